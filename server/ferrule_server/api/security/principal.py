"""The caller of the call under way, as authentication has determined it."""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Final

import grpc

from ferrule_server.errors import RoleRequired, TokenInvalid

Context = grpc.aio.ServicerContext[Any, Any]
"""A call in progress; Any, because reply types differ and no code here uses them."""

LOCAL: Final = "local"
"""The principal of every caller of a server without authentication."""

ANYBODY: Final = "-"
"""The principal of calls that need no credentials; it owns nothing."""

REFUSED: Final = "-\0"
"""The account of calls whose credentials are refused: probes do not wait for what these use. No principal has NUL."""

ADMIN: Final = "admin"
"""The one role besides that of a user."""


@dataclass(eq=False, slots=True)
class Caller:
    """The principal and role of one accepted credential.

    Invariant: the principal never changes, and a withdrawn credential stays withdrawn.

    Attributes:
        principal: The owner of every handle that the caller creates.
        is_admin: The caller has the role that AdminService requires.
        is_withdrawn: The credential is no longer accepted; set from any thread.
    """

    principal: str
    is_admin: bool = False
    is_withdrawn: bool = False

    def check(self) -> None:
        """Check that the credential is still valid.

        Raises:
            TokenInvalid: The credential was withdrawn after the call began.
        """
        if self.is_withdrawn:
            raise TokenInvalid("the token has been withdrawn; handles live on until their leases end")

    def require(self, role: str) -> None:
        """Check that the caller has a role.

        Raises:
            RoleRequired: The caller does not have it.
        """
        if role == ADMIN and not self.is_admin:
            raise RoleRequired(role)


# Each call runs in its own task and therefore in its own context: a value set there ends with the call.
_CALLER: Final[ContextVar[Caller]] = ContextVar("ferrule_caller")


def enter(caller: Caller) -> None:
    """Set the caller of the call under way, for its task and the tasks that it starts."""
    _CALLER.set(caller)


def caller_of(context: Context) -> Caller:  # noqa: ARG001  (names the call)
    """Return the caller of a call.

    Raises:
        LookupError: The call was not authenticated: its method is not registered through ``handlers``.
    """
    return _CALLER.get()


def principal_of(context: Context) -> str:
    """Return the principal of a call; it does not know the handles of others. Raises as :func:`caller_of`."""
    return caller_of(context).principal
