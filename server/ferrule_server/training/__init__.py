"""How the model that ships was made: corpus, tokenizer, training and export, from a plain checkout.

``python -m ferrule_server.training --out DIR --minutes 90`` repeats it. Nothing in the server imports
this package; it needs torch, tokenizers, safetensors and rich, and no network.
"""
