"""The KV cache as integers: blocks, sequences, lineages, leases. No tensors, no gRPC, no locks.

sequence_store.py   the one place where sequences, blocks and leases change together
sequence.py        the state of the server for the handles of one cache_id
handle.py          the handle: the first `length` tokens of one sequence
append_rule.py     what tokens sent with a handle mean
new_sequence.py    how a sequence is kept that a request creates
reservation.py     everything an append needs, held from admission to commit
reserved_slots.py  blocks set aside for sequences
block_pool.py      free and shared blocks
prefix_cache.py    full blocks that new sequences can share
windows.py         blocks outside the window of a sequence, given back to the pool
lineage.py         16 bytes that identify a model and a run of tokens
registry.py        which sequence a cache_id names
leases.py          which sequence may expire next
usage.py           what each principal holds, and its quotas
per_principal.py   records by principal, for the recently active ones
metrics.py         counters, and the state at a moment
"""
