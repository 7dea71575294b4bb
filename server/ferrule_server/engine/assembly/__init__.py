"""The assembly of an engine, and the parts that need most of the others.

assemble.py   makes the parts, each from parts that exist already
entrance.py   where each job goes
gauges.py     the state of the engine, read from any thread
"""
