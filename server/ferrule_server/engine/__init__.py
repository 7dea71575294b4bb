"""The engine: one thread that owns the KV cache and the executor. No gRPC and no torch here.

    engine.py       the thread: take jobs, form a step, run it, hand over the results
    assembly/       makes the parts of an engine and joins them
    jobs.py         the requests that the engine accepts and their results; the class of a job says what kind it is
    host_calls.py   operations that need no step: release, reserve, keep-alive, describe, list, view; what they show
    bridge/         between the event loop and the engine thread
    appends/        one append: judged, reserved, run row by row, committed, recorded for a retry
    steps/          one step: which rows, copy-on-write, the executor, steps queued ahead, warm-up
    durable/        sequences that survive the process: the journal, and replies that wait for it
    generation/     Generate and Forward: the engine enters appends for these requests
    metrics/        counters, timings, and figures of the journal
    masks.py        token masks that clients have registered
    settings.py     limits of the engine
    faults/         unexpected exceptions, and places where tests make the engine fail on purpose

The life of an append::

    bridge/gate       is there room in the queue, and does the principal's quota allow it? Then the inbox: lists of
                      jobs, in turn between principals                              ... engine thread from here
    appends/lanes     one job at a time on each sequence; the others wait in its lane
    appends/admission the append rule judges it; all blocks that it needs are reserved
    steps/batcher     its rows share steps with the rows of other appends
    steps/runner      shared blocks are copied, then the executor runs the step
    appends/commits   the tip moves, the lease is renewed, and a record is kept for a retry
    bridge/delivery   its result crosses to the event loop with all others of the step
"""
