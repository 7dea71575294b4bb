"""Durable sequences: what happens to them is written to a journal, and replies wait until it is on the disk.

    opening.py         read a journal, and continue it
    restore.py         what it described becomes sequences, records and creations again
    journal.py         what the engine reports: appends, forks, truncates, ends; snapshots, and a disk that fails
    answers.py         answers to appends as the journal keeps them, and back
    confirmations.py   outcomes that depend on the journal wait for the disk; what is answered while it is lost

The journal itself, its files and its format, is the package ``ferrule_server.durability``.
"""
