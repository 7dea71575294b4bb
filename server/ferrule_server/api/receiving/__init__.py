"""The bounds on a message before it becomes a request: memory, time, size and rates.

budgets.py  bytes and places for messages that are being received
bounds.py   the largest useful request of each method
parsing.py  parses requests, whose messages are counted if they are long
meter.py    quotas of calls and bytes per second
"""
