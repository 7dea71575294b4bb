"""Counters and timings of the engine; written on the engine thread, read from any thread.

counters.py    counts of steps, appends, replays, refusals
durability.py  figures of the journal of durable sequences
timings.py     the histogram, and those of steps, queue times and token latencies
"""
