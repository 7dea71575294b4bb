"""Tokenizer, text of drawn tokens, stop strings and chat templates."""
