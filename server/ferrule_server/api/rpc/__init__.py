"""The code around every method.

handlers.py     registers servicers; admits calls and ends them with a status
intake.py       receives the request: room, time, size, rates, turn, parsing
observe.py      notifies observers when a call begins and ends
calls.py        submits the jobs of a call and awaits their results
state.py        the phase of the server, and its parts once the model is loaded
status.py       the table from errors to gRPC status
reply_limit.py  the largest reply that the client of a call accepts
refusals.py     logs refusals, one line per reason
call_counts.py  counts calls by method, code and reason
"""
