"""A fast path with torch as its fallback: torch runs everything that the fast path cannot run or fails to run.

Nothing here depends on CUDA. A fast path provides a :class:`Runner` for steps and a :class:`Device` that both use.

executor.py   the executor: sends rows to the fast path or to torch, and handles errors
fast_path.py  the runner: not made yet, serving, or given up
split.py      splits a step into parts for the fast path and for torch
submitted.py  steps that were submitted
device.py     the device, and the errors that it reports
"""
