"""Between the event loop and the engine thread; no other room calls the event loop.

Locks are taken here and in ``durable/confirmations.py``, where the engine thread and the journal thread meet.

gate.py      jobs on their way to the engine thread: refuses those beyond a queue or a quota; principals take turns
delivery.py  outcomes on their way back, once per step
"""
