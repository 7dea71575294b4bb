"""The hostile tests: what clients who mean harm can do to a server and to its other clients, measured.

Run them with ``make test-hostile`` or ``python -m tests.hostile``; README.md explains method and bars.

    __main__.py    command line: choose attacks, run them, print a summary table
    registry.py    the list of all attacks
    verdicts.py    what an attack returns, and how it is printed
    servers.py     servers under attack, their tokens, their memory and their logs
    bodies.py      serialised requests, by the limits that the server publishes
    flooder.py     attacker: a process that sends such requests over many connections
    control.py     control: a process that sends as many bytes and burns as much CPU, without a server
    fairness.py    decode latency of other principals while one principal floods the server
    stranger.py    attacker without credentials: HTTP/2 written by hand
    strangers.py   memory and health checks of a server that strangers attack
    framer.py      attacker on frames: HTTP/2 by hand, compressed messages
    frames.py      memory and decodes while such an attacker floods a server, or the Envoy in front of it
    bare.py        a bare gRPC server: what a flood of frames takes from any
    memory.py      text queue and token masks: time and memory
    lines.py       log lines left by clients that are killed
"""
