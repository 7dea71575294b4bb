"""A fast path with torch behind it: whatever the fast path cannot run, or fails to run, torch runs.

Nothing here knows CUDA. A fast path brings a :class:`Runner` for steps and a :class:`Device` that both use.

executor.py   the executor: which rows go to the fast path, which to torch, and what happens when something fails
fast_path.py  whether there is a runner: being built, serving, serving without some parts, or given up
split.py      splits a step into parts for the fast path and for torch
submitted.py  steps that were submitted and whose results have not been read
device.py     what the executor needs of the device, and the errors that a device reports
"""
