"""What the engine counts and measures; written on the engine thread, read from any thread.

counters.py   counts of steps, appends, replays, refusals
timings.py    histograms of steps, queue times and token latencies
histogram.py  the histogram itself
views.py      what a server view contains
"""
