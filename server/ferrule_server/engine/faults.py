"""Faults: bugs of ours, told to the caller by an id and to the log in full."""

from __future__ import annotations

import logging
import secrets

from ferrule_server.errors import EngineFault

_LOG = logging.getLogger(__name__)


def fault(what: str) -> EngineFault:
    """Log the exception being handled under a new id and return the error that carries it."""
    fault_id = secrets.token_hex(4)
    _LOG.exception("%s fault_id=%s", what, fault_id)
    return EngineFault(fault_id)
