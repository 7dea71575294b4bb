"""The assembly of an engine, and its state as others see it.

assemble.py   makes the parts, each from parts that exist already
gauges.py     the state of the engine, read from any thread
"""
