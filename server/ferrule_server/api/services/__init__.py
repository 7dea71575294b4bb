"""The servicers: one method per RPC. It reads the request, submits jobs and writes the reply.

executor.py   ModelExecutorService
tokenizer.py  TokenizerService
admin.py      AdminService
"""
