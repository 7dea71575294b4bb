"""How the bundled model was made: from a plain checkout to a model folder.

``python -m ferrule_server.training --out DIR --minutes 90`` repeats it. Nothing in the server imports this package; it
needs torch, tokenizers, safetensors and rich, and no network.

corpus.py     the training text: the Python standard library
tokenizer.py  a byte-level BPE tokenizer, trained on the corpus
model.py      the model while it is trained: Qwen3 in plain torch
train.py      the training loop
export.py     trained weights -> a model folder
__main__.py   the command line
"""
