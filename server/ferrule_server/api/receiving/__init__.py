"""What a message may take before it is a request: memory, time, and a turn on the event loop.

budgets.py     bytes and places for messages that are being received
bounds.py      the largest request that each method can use
parsing.py     parses large requests in slices
turns.py       turns on the event loop between principals
call_rates.py  quotas of calls and bytes per second
meter.py       what has been spent of a rate
"""
