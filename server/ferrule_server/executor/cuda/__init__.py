"""The GPU executor: decode and verify steps in the kernels of ``kernels/cuda`` over buffers allocated once, in graphs.

Where to find what::

    cuda_executor.py   the executor: what goes to the kernels, what to torch, and what happens when something fails
    runner.py          one step on the kernels: upload, replay (or launch), download; two steps in flight
    graphs.py          which graphs exist, which are wanted, capturing one between two steps
    chain.py           the launches of a step, from embedding to logits; weights.py: what they read
    choices.py         the launches behind the logits: shaping, drawing, scoring; masks.py: token masks on the device
    buffers.py         every buffer, where each field lies; staging.py: pinned memory that is not overwritten too soon
    inputs.py          a step's arrays into the staged fields; split.py: a step into parts; buckets.py: sizes of graphs
    kernel_build.py    kernels compiled in the background; memory_plan.py: what the memory of the GPU is for
    gpu.py             what all of that needs of a GPU; torch_gpu.py: the real one
"""
