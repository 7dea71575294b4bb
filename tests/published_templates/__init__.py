"""Published chat templates, rendered by the product and by transformers; ``python -m tests.published_templates``."""
