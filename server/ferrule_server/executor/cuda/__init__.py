"""The GPU executor: decode and verify steps in the kernels of ``kernels/cuda``, over buffers allocated once, in graphs.

How it works is told in ``docs/cuda_runner.md``. Where to find what::

    compose.py         puts all of it together; memory_plan.py: what the memory of the GPU is for;
                       device_memory.py: what this process holds of it
    cuda_executor.py   the executor: what goes to the kernels, what to torch, and what happens when something fails;
                       kernel_path.py: whether there are kernels; kernel_build.py: compiles them beside a server that
                       serves; split.py: a step into parts; submitted.py: steps that nobody has read yet
    runner.py          one step on the kernels: upload, replay or launches, download; two of them in flight
    graphs.py          which graphs exist, which are wanted; buckets.py: their sizes
    chain.py           the launches of a step, from tokens to logits: linears.py, weights.py, kernel_choice.py (which
                       kernel for what), kernel_set.py (loads them)
    block_copies.py    copy-on-write
    choices.py         what rows want behind the logits: choice_inputs.py (records), choice_launches.py, masks.py
    buffers.py         every buffer; layout.py: where a field lies; inputs.py: a step's arrays into the fields;
                       staging.py: pinned memory that is not overwritten too soon
    bundle_file.py     whether a setting names a bundle; asked on machines without a GPU too
    gpu.py             what all of that needs of a GPU; torch_gpu.py: the real one

A new kernel of a step goes into ``chain.py`` or ``choice_launches.py``, its buffers into ``buffers.py``; only
``torch_gpu.py`` may touch ``torch.cuda``.
"""
