"""The recipe of the bundled model: from a plain checkout to a model folder.

``python -m tools.training --out DIR --minutes 90`` runs it, with what the tests need installed and no
network.

corpus.py     the training text: the Python standard library
tokenizer.py  a byte-level BPE tokenizer, trained on the corpus
model.py      the model during training: Qwen3 in plain torch
train.py      the training loop
export.py     writes trained weights to a model folder
__main__.py   the command line
"""
