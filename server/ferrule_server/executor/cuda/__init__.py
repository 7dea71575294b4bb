"""The fast path of GPUs: decode and verify steps on the kernels of ``kernels/cuda``, in graphs.

``README.md`` explains how it works; ``executor/fallback`` decides which steps run here. Where to find what::

    compose.py         puts all of it together; options.py: what the settings say; memory_plan.py: how the memory of the
                       GPU is divided
    bundle.py          finds and reads the compiled kernels; the settings ask it on machines without a GPU too
    cuda_device.py     the GPU as ``executor/fallback`` sees it
    early_launch.py    when a kernel may start while the one before it runs; litmus.py: whether the GPU does that right
    runner.py          one step on the kernels: upload, replay or launches, download; two in flight
    graphs.py          which graphs exist, and which are wanted; buckets.py: their sizes
    chain.py           the launches of a step, from tokens to logits: linears.py, weights.py, kernel_choice.py (which
                       kernel for what), kernel_set.py (loads them)
    choices.py         what rows return, from the logits: choice_inputs.py (records), choice_launches.py, row_copies.py
                       (whole rows)
    buffers.py         every buffer; layout.py: where a field lies; inputs.py: a step's arrays into the fields;
                       staging.py: pinned memory that is not overwritten too soon
    gpu.py             what all of this needs of a GPU; torch_gpu.py: the real GPU; driver.py: launches

A new kernel of a step goes into ``chain.py`` or ``choice_launches.py``, its buffers into ``buffers.py``; only
``torch_gpu.py`` may touch ``torch.cuda``.
"""
