"""Encodes, decodes and renders texts, off the event loop.

queue.py    bounded in jobs and bytes, in turn between principals
workers.py  the threads that do the work
"""
