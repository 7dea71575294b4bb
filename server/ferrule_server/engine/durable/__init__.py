"""Durable sequences: what happens to them is written to a journal, and replies wait until it is on the disk.

    journal.py   what the engine reports: appends, forks, truncates, ends; snapshots, and what follows a failing disk
    answers.py   answers to appends as the journal keeps them, and back
    barrier.py   outcomes that wait for the disk
    restore.py   a journal that was read becomes sequences, records and creations again

The journal itself, its files and its format, is the package ``ferrule_server.durability``.
"""
