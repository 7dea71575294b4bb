"""Durable handles: a journal on disk from which a new server process continues. docs/durability.md has the format.

files.py      the system calls that the journal uses, and nothing else touches the disk
frames.py     frames of a segment: written, found again, torn or damaged
directory.py  one owner of a directory, its identity, its segments
writer.py     the thread that writes groups of records and confirms them
"""
