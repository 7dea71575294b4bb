"""The program that tries the kernels on a GPU: numerics, replays, bandwidth (``make test-gpu``).

run.py              the program: stages, each in a process of its own, and the report
worker.py           what such a process runs
cases.py            kernels with inputs and expected outputs; with attention_cases.py, layer_cases.py, logit_cases.py
gpu.py              a GPU for kernels: memory, launches, times
measure.py          times of launches and graphs
probes.py           kernels that measure the ceilings of the device
layout.py           the layouts of the KV pool, timed against each other
plugin.py           pytest plugin that runs the simulator's tests on the GPU
device_memory.py    the simulator's memory, on the device
recorded_driver.py  a driver that records calls instead of making them
build_bundle.py     compiles all kernels that the program needs, for a machine without the compiler
"""
