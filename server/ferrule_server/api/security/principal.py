"""Who asks: the caller of the call under way, as ``auth`` found it."""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Final

import grpc

from ferrule_server.errors import RoleRequired, TokenInvalid

LOCAL: Final = "local"
"""Everybody who can reach a server without authentication."""

ANYBODY: Final = "-"
"""Principal of a call that needs no credentials, or whose credentials are refused; owns nothing."""

ADMIN: Final = "admin"
"""The one role there is besides that of a user."""


@dataclass(eq=False, slots=True)
class Caller:
    """One accepted credential: whom it stands for.

    Invariant: the principal never changes, and what is withdrawn stays withdrawn.

    Attributes:
        principal: Owner of every handle made with it.
        is_admin: It has the role that AdminService needs.
        is_withdrawn: The credential is accepted no longer; set by whoever manages credentials, from any thread.
    """

    principal: str
    is_admin: bool = False
    is_withdrawn: bool = False

    def check(self) -> None:
        """Make sure that the credential still holds: asked for every frame of a stream, so one attribute and no more.

        Raises:
            TokenInvalid: It was withdrawn after the call began.
        """
        if self.is_withdrawn:
            raise TokenInvalid("the token has been withdrawn; handles live on until their leases end")

    def require(self, role: str) -> None:
        """Make sure that the caller has a role.

        Raises:
            RoleRequired: It has not.
        """
        if role == ADMIN and not self.is_admin:
            raise RoleRequired(role)


# Each call runs in a task of its own and so in a context of its own: a value set there ends with the call.
_CALLER: Final[ContextVar[Caller]] = ContextVar("ferrule_caller")


def enter(caller: Caller) -> None:
    """Make ``caller`` the one of the call under way, for all that runs in its task and in those it starts."""
    _CALLER.set(caller)


def caller_of(context: grpc.aio.ServicerContext[Any, Any]) -> Caller:  # noqa: ARG001  (says which call is meant)
    """Return the caller of a call.

    Raises:
        LookupError: Nobody authenticated it: a method that is not served through ``handlers``.
    """
    return _CALLER.get()


def principal_of(context: grpc.aio.ServicerContext[Any, Any]) -> str:
    """Return the principal of a call; handles of other principals are unknown to it. Raises as :func:`caller_of`."""
    return caller_of(context).principal
