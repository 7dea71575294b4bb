"""Between the event loop and the engine thread; no other room takes a lock or calls the event loop.

gate.py      refuses jobs that exceed a queue or a quota, before they reach the engine thread
inbox.py     jobs on their way to the engine thread; principals take turns
outlet.py    where outcomes leave: at once, or when a journal has confirmed them
delivery.py  outcomes on their way back, once per step
"""
