"""The wire: the only package that imports grpc and ferrule.v1.

serve.py        the gRPC server: binding, draining
services/       one method per RPC
requests/       message -> job: every field is checked here
responses/      result -> message
streams/        StreamDecode, Generate, Forward, and batches
rpc/            the code around every method: registration, admission, observers, errors
receiving/      memory, time and rates for messages before they are parsed
texts/          the queue and the threads for Tokenize, Detokenize and ApplyChatTemplate
security/       tokens, certificates, TLS, principals
telemetry/      call log, metrics, traces
web/            the HTTP side: /metrics and the page
limits.py       limits of messages and streams
unix_socket.py  reserves a unix socket path for one server
"""
