"""The errors of calls: one tree, rooted in ``FerruleError``."""

from ferrule_client import errors
from ferrule_client.errors import *  # noqa: F403

__all__ = errors.__all__
__doc__ = errors.__doc__
