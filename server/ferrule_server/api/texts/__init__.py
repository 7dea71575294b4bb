"""Tokenize, detokenize and render texts, off the event loop.

queue.py    a queue bounded in jobs and bytes, in turn between principals
workers.py  the threads that do the work
"""
