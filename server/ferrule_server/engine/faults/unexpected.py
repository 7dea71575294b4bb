"""Faults: unexpected exceptions. The log has the full traceback; the caller gets an id."""

from __future__ import annotations

import logging
import secrets
import sys

from ferrule_server.errors import EngineFault, without_refusals

_LOG = logging.getLogger(__name__)


def fault(what: str) -> EngineFault:
    """Log the current exception under a new id, and return the error that carries the id."""
    fault_id = secrets.token_hex(4)
    failure = sys.exception()
    _LOG.error("%s fault_id=%s", what, fault_id, exc_info=failure and without_refusals(failure))
    return EngineFault(fault_id)
