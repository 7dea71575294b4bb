"""Torch, with which these tests compare small models, uses one thread."""

from tests.model.conftest import one_thread

__all__ = ["one_thread"]
