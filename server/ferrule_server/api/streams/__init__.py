"""Calls that are answered piece by piece, and batches.

decode_stream.py  StreamDecode
answer_stream.py  Generate and Forward
replies.py        messages of Generate and Forward
writer.py         writes the messages of a stream and ends the call
batches.py        BatchPrefill, BatchDecode, UnifiedDecode
"""
