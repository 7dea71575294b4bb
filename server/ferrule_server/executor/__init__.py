"""Executors: everything that runs a step. The engine knows `base.py` only.

base.py       the protocol of an executor, in numpy values
torch.py      the decoder in torch, on any device: the fallback and the reference for results
reference.py  no weights, a real paged KV pool: for tests, starts at once
sampling/     which token follows: penalties, distributions, draws, drafts; on the host and batched on the device
cuda/         the kernels of kernels/cuda, in CUDA graphs
buffers.py    the KV pool of the torch executor
devices.py    which device a model runs on
"""
