"""Counters and timings of the engine; written on the engine thread, read from any thread.

counters.py    counts of steps, appends, replays, refusals
durability.py  figures of the journal of durable sequences
timings.py     histograms of steps, queue times and token latencies
histogram.py   the histogram itself
views.py       the contents of a server view
"""
