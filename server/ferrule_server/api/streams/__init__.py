"""Calls that are answered piece by piece, and batches.

decode_stream.py    StreamDecode
answer_stream.py    what Generate and Forward share: writing as fast as the client reads
generate_stream.py  frames of Generate
forward_stream.py   frames of Forward
batches.py          BatchPrefill, BatchDecode, UnifiedDecode
"""
