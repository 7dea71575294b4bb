"""Requests that are answered piece by piece, by appends that the engine enters itself.

drivers.py   holds all of them, takes their outcomes and enters their next appends
generate.py  Generate: the decode loop, for one sequence or several branches
stops.py     the conditions that end a branch
forward.py   Forward: all rows of some tokens; no sequence is kept
"""
