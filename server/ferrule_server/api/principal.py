"""Who asks: the one place that turns a call's credentials into a principal."""

from __future__ import annotations

from typing import Any, Final

import grpc

LOCAL: Final = "local"
"""Everybody who can reach a server without authentication."""


def principal_of(context: grpc.aio.ServicerContext[Any, Any]) -> str:  # noqa: ARG001  (nothing is authenticated yet)
    """Return the principal of a call; handles of other principals are unknown to it."""
    return LOCAL
