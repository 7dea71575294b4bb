"""Durable handles: a journal of every change to a sequence, and the state that it describes after a restart.

``docs/durability.md`` specifies what is promised and the format.
"""
