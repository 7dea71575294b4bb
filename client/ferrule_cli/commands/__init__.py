"""The commands of ``ferrule``, a module for each; each has ``EXAMPLES``, ``add_options`` and ``run``."""
