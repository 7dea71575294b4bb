"""The executor of processors: every step on the kernels of kernels/cpu, none in torch.

executor.py  the executor: steps and blocks
support.py   which models the kernels run, and why not
weights.py   the weights, packed in one arena of huge pages
units.py     in which order the rows of a matrix are packed
layout.py    codes of a packed matrix as the kernels read them
stages.py    the list of stages of a model: what the kernels do in a step
records.py   the records that the kernels read, of a model and of its threads
memory.py    the record of a step, and the memory that it names
tasks.py     how the attention of a step is cut into tasks
outputs.py   what output rows ask of the kernels, and what they return
workers.py   the threads of a step
crowding.py  how many a step uses while other processes keep cores busy
"""
