"""Models by name, fetched from the Hugging Face hub into its cache layout.

models.py  org/name -> a complete folder of one commit
client.py  the only module that imports huggingface_hub
fetch.py   one file by HTTP ranges, resumed where it was cut off
cache.py   the cache folder of one model
"""
