"""The client library. Its public names are those of ``ferrule``, ``ferrule.types``, ``.errors`` and ``.admin``.

``aio`` is the source of both clients, ``sync`` is written from it (`tools/strip_async.py`); the modules here
are shared.
"""
