"""The GPU kernels at development: compiled, checked on their machine code, and packed into bundles for servers.

compile.py       kernel and constants -> PTX (numba) -> cubin (ptxas), and what a multiprocessor has room for
build.py         the command that writes bundles, and a wheel of them
machine_code.py  the rules that machine code is held to; sass.py: machine code as a graph; addressing.py: rules on
                 addresses, read from the PTX
report.py        the table of tools/kernels/machine_code.md

Only ``compile.py`` knows the compiler. None of this is part of the server, and none of it needs a GPU or a driver.
"""
