"""A GGUF file as a model: the format of llama.cpp, where one file holds configuration, tokenizer and weights.

header.py          the header of a file: metadata, and what it says of the tensors
container.py       the same of a file with all its parts, checked: where the tensors are
architectures.py   which architectures load, and how their files differ from those of transformers
network.py         metadata -> what config.json and generation_config.json would say
names.py           the names of tensors -> those that a folder of safetensors has
vocabulary.py      metadata -> what tokenizer.json and tokenizer_config.json would say
token_list.py      the tokens of a file, checked
pre_tokenizers.py  how each kind of vocabulary splits a text
files.py           all these files of a model folder, made from one GGUF file
blocks.py          the block types: how quantised values are stored
"""
