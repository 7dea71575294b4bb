"""Numbers that several kernels share."""

__all__ = ["CHUNK", "LN_2", "LOG2", "LOG2_E"]

CHUNK = 8
"""bf16 values in 16 bytes, what a lane loads at a time."""
LOG2 = {1 << bit: bit for bit in range(20)}
"""Logarithms of powers of two, for shifts."""
LOG2_E = 1.4426950408889634
LN_2 = 0.6931471805599453
