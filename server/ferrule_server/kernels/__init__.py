"""The operations of the decoder.

reference.py  every operation in plain torch: the definition of its result
cpu/          a decoder step on processors
cuda/         the kernels of the GPU
"""
