"""The load generator of ``ferrule bench --concurrency`` and ``--rate``.

options     the options of the command
command     the levels in their order, and JSON
loops       when requests begin: closed loop, open loop
requests    one request on the client library: a prompt, its branches, their tokens, the release
records     what became of the requests, and the figures made of it
watch       whether the generator itself is the limit
interrupts  Ctrl-C and SIGTERM inside the event loop
view        the table for people
"""
