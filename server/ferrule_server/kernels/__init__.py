"""The operations of the decoder.

reference.py  every operation in plain torch: the definition of its result
matrix_kinds  in which form the numbers of a linear layer are kept
cpu/          a decoder step on processors
cuda/         the kernels of the GPU
"""
