"""The client of plain calls, written from the asyncio one (`tools/strip_async.py`).

Several threads may use one client, each with caches of its own. Ctrl-C may strike at any point: an append that was under
way is in doubt, as after a timeout, and the next call on the cache handles it.
"""
