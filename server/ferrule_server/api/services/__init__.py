"""The servicers: one method per RPC. It reads the request, submits jobs and writes the reply.

executor.py   ModelExecutorService
tokenizer.py  TokenizerService
admin.py      AdminService
health.py     grpc.health.v1.Health
"""
