"""Model folders and GGUF files: configuration, weights, and the decoder in torch.

config.py           ModelConfig: the network, and what each of its layers computes
config_reader.py    config.json and generation_config.json -> one validated ModelConfig
checkpoint.py       which tensors the files hold
stored.py           a tensor of a file, and the types in which files hold values
parts.py            the table of the tensors of a model
tensors.py          these tensors in memory, and where those of a checkpoint go
packed.py           the numbers of packed matrices: codes, scales and offsets
weights.py          safetensors or GGUF -> these tensors
decoder.py          the decoder
attention.py        attention over the block pool
flash_attention.py  the same by torch's flash attention operator, on GPUs
pool_shape.py       places of K and V in the pool, and how they are written
linear.py           linear layers, repacked for oneDNN where that is faster
rope.py             rotary positions: frequencies, and which pairs of a head turn
memory.py           large tensors in huge pages
gguf/               a GGUF file in the place of a model folder
families/           what each family of models reads from config.json; begin there to add one
hub.py              models by name, from the Hugging Face hub
hub_names.py        what such names mean
"""
