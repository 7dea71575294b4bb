"""Faults: bugs of ours, told to the caller by an id and to the log in full."""

from __future__ import annotations

import logging
import secrets
import sys

from ferrule_server.errors import EngineFault, without_refusals

_LOG = logging.getLogger(__name__)


def fault(what: str) -> EngineFault:
    """Log the exception being handled under a new id and return the error that carries it."""
    fault_id = secrets.token_hex(4)
    failure = sys.exception()
    _LOG.error("%s fault_id=%s", what, fault_id, exc_info=failure and without_refusals(failure))
    return EngineFault(fault_id)
