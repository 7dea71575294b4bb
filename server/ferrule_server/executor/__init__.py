"""Executors run steps. The engine knows `base.py` only.

base.py       the protocol of an executor, in numpy values
torch.py      the decoder in torch, on any device: the fallback and the reference for results
reference.py  no weights, a real paged KV pool: for tests, starts at once
sampling/     chooses tokens: penalties, distributions, draws, drafts; on the host and batched on the device
fallback/     a fast path with torch behind it
cuda/         the fast path of GPUs: the kernels of kernels/cuda, in CUDA graphs
buffers.py    the KV pool of the torch executor
devices.py    which device a model runs on
"""
