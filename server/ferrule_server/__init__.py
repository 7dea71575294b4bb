"""The Ferrule server: a decoder-only language model behind explicit KV-cache handles."""

__version__ = "0.1.0"
