"""Durable handles: a journal on disk from which a new server process continues. README.md has the format.

files.py      the system calls that the journal uses, and nothing else touches the disk
frames.py     frames of a segment: written, found again, torn or damaged
directory.py  one owner of a directory, its identity, its segments
writer.py     the thread that writes groups of records and confirms them
records.py    the records, and how they are written
decoder.py    how they are read
replay.py     the state that they describe, each checked against the state before it
reader.py     a whole directory: what survives, what is torn, what is damaged
__main__.py   the commands `inspect` and `verify`

The life of a record: the engine makes a change and appends the bytes of an Encoder (records.py) to the open group. At
the end of the step the group goes to the thread (writer.py), which writes one frame (frames.py) to the last segment
(directory.py), syncs it, and reports the number of the group, so that replies which wait for it are sent. At the next
start the segments are found and read (reader.py) into plain state (replay.py), from which the engine continues.
"""
