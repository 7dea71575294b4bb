"""A real, trained model as a folder of the Hugging Face layout, for tests and benchmarks; nothing of it is shipped.

``smollm2``    finds the file in its package, checks it, and keeps the folder in ``build/real_models``
``convert``    writes the weights and the configuration of a GGUF file of the Llama architecture
``tokenizer``  writes the byte-level tokenizer and the chat template of a GGUF file
"""
