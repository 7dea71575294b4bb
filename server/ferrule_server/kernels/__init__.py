"""The operations of the decoder.

reference.py  every operation in plain torch: the definition of its result
quantise.py   weights in int8
cuda/         the kernels of the GPU
"""
