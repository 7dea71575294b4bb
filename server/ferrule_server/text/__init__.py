"""Tokenizer and (later) chat template."""
