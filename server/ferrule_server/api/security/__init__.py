"""Callers and their credentials.

auth.py                credentials of a call -> its caller
principal.py           the caller of the call under way
strangers.py           pauses for callers without credentials, and the end of their connections
client_certificate.py  the principal in a client certificate
token_file.py          bearer tokens
tls.py                 certificates of the server, reloaded when they change
file_watch.py          reads files again when they change
"""
