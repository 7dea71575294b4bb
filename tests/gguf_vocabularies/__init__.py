"""Published GGUF vocabularies, compared with llama.cpp; ``python -m tests.gguf_vocabularies``."""
