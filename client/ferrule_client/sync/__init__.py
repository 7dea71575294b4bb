# Written by tools/strip_async.py from ../aio/__init__.py: change that and run `make sync`.
"""The asyncio client, the source from which the sync one is written (`tools/strip_async.py`).

Many tasks may use one client, each with caches of its own; a client belongs to the event loop it was made in. A task
may be cancelled at any point: an append that was under way is in doubt, as after a timeout, and the next call on the
cache handles it.
"""
