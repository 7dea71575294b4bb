"""The executor of processors: every step on the kernels of kernels/cpu, none in torch.

executor.py  the executor: steps and blocks
support.py   which models the kernels run, and why not
weights.py   the weights, packed in one arena of huge pages
records.py   the records that the kernels read, and the memory of a step
tasks.py     how the attention of a step is cut into tasks
outputs.py   what output rows ask of the kernels, and what they return
workers.py   the threads of a step
crowding.py  how many a step uses while other processes keep cores busy
"""
