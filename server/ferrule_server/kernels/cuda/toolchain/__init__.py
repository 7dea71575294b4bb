"""From a kernel in Python to one in the GPU: compiler, cache, driver, and what is checked of the machine code."""
