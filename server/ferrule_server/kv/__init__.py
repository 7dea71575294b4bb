"""The KV cache as integers: blocks, sequences, lineages, leases. No tensors, no gRPC, no locks.

sequence_store.py   the one place where sequences, blocks and leases change together
sequence.py        what stands behind the handles of one cache_id
handle.py          the handle: the first `length` tokens of one sequence
append_rule.py     what tokens sent with a handle mean
reservation.py     all that an append needs, held from admission to commit
reserved_slots.py  blocks set aside for a sequence
block_pool.py      free and shared blocks
prefix_cache.py    full blocks that new sequences can share
lineage.py         16 bytes that name a model and a run of tokens
registry.py        which sequence a cache_id names
leases.py          which sequence expires next
usage.py           what each principal holds, against its quotas
per_principal.py   counters of one principal
metrics.py         counters of the pool
"""
