"""``ferrule models`` and ``ferrule check``: which models load, in how much memory, and what runs them.

__main__.py   the two commands: arguments, output, exit codes
report.py     one model: whether it loads, how, and what runs it here; the models in the cache of the hub
catalogue.py  every family: its models, what it differs by, and which kernels run it
"""
