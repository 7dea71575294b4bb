"""From a kernel in Python to one on the GPU.

compile.py       kernel and constants -> PTX (numba) -> cubin (ptxas); needs no GPU
catalog.py       every kernel that a model needs
build.py         finds cubins in a bundle or the cache, compiles the others
sources.py       the hash that names a kernel: its sources and constants
cubin_cache.py   cubins on disk
bundle.py        all cubins for one architecture in one file
cubins.py        the command line: build, list, verify, prune
progress.py      progress of the commands that compile
cpus.py          how many processors this process may use
driver.py        launches kernels through the CUDA driver API
machine_code.py  the rules that machine code is held to
addressing.py    rules on addresses, checked in the PTX
sass.py          disassembled machine code, as a graph
report.py        the table of docs/kernels.md
"""
