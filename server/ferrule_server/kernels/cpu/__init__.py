"""Kernels of processors: a whole decoder step as machine code that Numba compiles at start, run by several threads.

pack.py             weights as the kernels read them, quantised on the way
step.py             the step: its stages in order, and the barriers between them
kinds.py            the kinds of stages
rows.py             stages that are shared out by rows
linear.py           linear layers, with what follows each of them
multiply.py         the part of them that depends on the kind of the matrix
experts.py          mixtures: which experts a row passes, its pairs with them
heads.py            heads that have been projected: norm, rotation, and the pool
dot.py              the product of a few rows and 64 outputs, for each set of instructions
tiles.py            the same product with the tiles of AMX
dot_quantised.py    the same product of quantised weights, in integers
calls.py            calls of kernels by their address
operands.py         what each of them is given
attention.py        paged attention, by tiles of tokens
attention_block.py  its products with one block of K or V
head.py             what outputs need of logits: the best, the k best, sums of exponentials
choice.py           the choice of a token from a row of logits
doubles.py          its passes over 64 tokens in float64, and exp
philox.py           the random number of a draw
activations.py      embedding, norms, rotation, and how inputs of linear layers are stored
lanes.py            16 float32 lanes as a type of Numba
scalars.py          single numbers in memory
loops.py            loops and branches of LLVM code
records.py          the records that kernels read: thread, stage, layer, model, step
plan.py             what is constant in compiled code: instructions and sizes
sync.py             barrier, claims of work, parking
compiled.py         machine code of a plan, kept on disk
processor.py        which instructions this processor has
kernel.py           the decorators of all these functions
"""
