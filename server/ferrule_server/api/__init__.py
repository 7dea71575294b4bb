"""The wire: the only package that imports grpc and ferrule.v1.

serve.py        the gRPC server: binding, draining
services/       one method per RPC
requests/       message -> job: every field is checked here
responses/      result -> message
streams/        StreamDecode, Generate, Forward, and batches
rpc/            what every call passes: registration, admission, observers, errors
receiving/      room, time and turns for messages before they are parsed
texts/          the queue and the threads for Encode, Decode and ApplyChatTemplate
security/       tokens, certificates, TLS, principals
telemetry/      call log, metrics, traces
web/            the HTTP side: /metrics and the page
health.py       grpc.health.v1
limits.py       limits of messages and streams
unix_socket.py  takes a unix socket path for one server
"""
