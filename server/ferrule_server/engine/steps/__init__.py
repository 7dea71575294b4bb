"""Steps: the rows that run together, and how they run.

stepper.py     plans a step, runs it, commits it
batcher.py     chooses the rows of a step and builds its arrays
pace.py        limits prefill rows so that decodes are not delayed
costs.py       what the rows of each principal add to a step, and how many may run
debts.py       says who lets others go first after a long step
runner.py      copies shared blocks and runs the executor
lookahead.py   queues the next step before the results of the last one are read
warmup.py      steps that touch no sequence
top_tokens.py  the debug log of the likeliest tokens
"""
