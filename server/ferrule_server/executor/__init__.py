"""Executors run steps. The engine imports only `base.py`.

base.py       the protocol of an executor, in numpy values
torch.py      the decoder in torch over its KV pool, on any device: the fallback and the reference for results
reference.py  no weights, a real paged KV pool: for tests, starts at once
sampling/     chooses tokens: penalties, distributions, draws, drafts; on the host and batched on the device
fallback/     a fast path with torch as its fallback
cpu/          the kernels of kernels/cpu, on processors
cuda/         the fast path of GPUs: the kernels of kernels/cuda, in CUDA graphs
block_pool.py the KV pool as one preallocated tensor
devices.py    the device that a model runs on
sizes.py      bytes of weights and KV, from the configuration alone
host_plan.py  what the memory of the host is for, and whether it suffices
"""
