"""The servicers: one method per RPC, which reads the request, submits jobs and writes the reply.

executor.py   ModelExecutorService
tokenizer.py  TokenizerService
admin.py      AdminService
"""
