"""The decode step in Numba-CUDA: one file per operation, one file of intrinsics, one launch path.

Operations of a step:

embed.py         embeddings of the step's tokens
add_norm.py      residual and RMSNorm
gemv.py          linears of one or two rows, on CUDA cores
gemm.py          linears of 3 to 64 rows, on tensor cores
attention.py     attention of up to 16 query rows per KV head, on tensor cores: append.py (what stands in front of it),
                 attention_tile.py (a warp and 16 tokens), attention_merge.py (sums of warps, splits and CTAs)
work_list.py     what each CTA of attention does, written by the host
head.py          the output head for one or two rows; argmax.py: the best token of any number of rows; best_token.py:
                 keys that order logits

Operations on rows of logits:

sample.py        penalties, bias, mask and one draw per row; radix_select.py: top-k and top-p in it
log_sum_exp.py   log-sum-exp, entropy, single log-probabilities
top_k.py         the k largest in order; logit_rows.py: what all of these share

A test of the GPU, in no step:

litmus.py        whether a kernel that starts early sees all that the one before it wrote

The language of kernels:

specialise.py    a kernel in Python -> straight-line code for given constants
intrinsics.py    every instruction that Python has no word for
spec.py          a compiled kernel and its promises; constants.py: shared numbers
ticket.py        CTAs that meet without waiting; vectors.py: vectors in shared memory
catalog.py       every kernel that a model needs

The compiler is in ``kernel_builder``, the checks of machine code are tools of development (``tools/kernels``);
``executor/cuda`` loads the compiled kernels from a bundle and launches them.
"""
