"""The errors of calls: one tree, rooted in ``FerruleError``; ``ferrule_client.errors`` draws it."""

from ferrule_client import errors
from ferrule_client.errors import *  # noqa: F403

__all__ = errors.__all__
