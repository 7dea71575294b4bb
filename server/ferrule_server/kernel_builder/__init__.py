"""Compiles GPU kernels into bundles: for a release (``tools/kernels``), or at the start of a server that has none.

compile.py   kernel and constants become a cubin
bundles.py   cubins become the file that servers load
at_start.py  the bundle of one model and GPU, built once in a process of its own
__main__.py  that process
"""
