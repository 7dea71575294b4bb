"""The bounds on a message before it becomes a request: memory, time and size.

budgets.py  bytes and places for messages that are being received
bounds.py   the largest useful request of each method
parsing.py  parses requests, whose messages are counted if they are long
"""
