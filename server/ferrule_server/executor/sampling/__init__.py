"""Chooses the next token: the same logits and seed give the same token on every executor.

selection.py       tokens and log-probabilities from logits, on the host; penalties, bias, mask
distributions.py   the distribution to draw from: temperature, top-k, top-p, min-p
drafts.py          speculative sampling: a draft is accepted or replaced
exponential.py     exp, as the kernels of processors compute it
ranking.py         the largest logits, ties to the lowest id
philox.py          random numbers
device_outputs.py  everything that rows return, batched in torch
device_sampler.py  the distribution and the draw, batched in torch
"""
