"""Between the event loop and the engine thread; no other room takes a lock or calls the event loop.

gate.py      jobs on their way to the engine thread: refuses those beyond a queue or a quota; principals take turns
delivery.py  outcomes on their way back, once per step
"""
