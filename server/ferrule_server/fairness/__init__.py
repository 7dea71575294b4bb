"""Fairness between principals: who is next, who may hold how much, and how fast each may go.

queue.py   FairQueue: whose item is next, by the measured cost of earlier ones
places.py  Places: how many places of a shared total each principal may hold
bucket.py  Bucket: a rate that may be overdrawn; Meter: one for each principal
turns.py   shares of the host's time, measured on the event loop and on the engine thread, and turns by these shares

The first three run nothing and wait for nothing; each is for one thread, or used under its owner's lock.
"""
