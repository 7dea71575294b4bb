"""Fair shares of the host's time: which principal may work on the event loop next, and how much.

The batcher shares out rows. All other work for a request (parsing, planning, refusing and answering on the event loop;
judging and host calls on the engine thread) is measured here, per principal::

    event loop     charge(principal, ns) --.
    engine thread  add_host_work(...) -----+--> Account.ahead: when its next piece of work may begin
    engine thread  add_service(...) -------'    demand of each principal: how much the others have to leave

A principal that is alone is never held back, and nothing is measured. While several are active, each may use the larger
of a part of an equal share and the time that the others leave over. The limit may be exceeded by one piece of work,
which is worked off before the next one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from typing import Final

from ferrule_server.fairness.bucket import Bucket

_WINDOW_NS: Final = 100_000_000
"""Demands are measured over windows of this length."""
_ACTIVE_NS: Final = 1_000_000_000
"""A principal counts as active for this long after its last request or step."""
_BURST_NS: Final = 1_000_000
"""Work that a principal within its share may do at once before it has to wait."""
_APPEND_NS: Final = 50_000
"""Work on the event loop and the engine thread that belongs to one append in a step; it is not charged."""
_PART: Final = 0.5
"""Part of an equal share that work without rows may take: it holds the interpreter, which the engine needs too."""
_LEAST_DEMAND: Final = 0.01
"""Share of the time below which a principal is not counted when the time is divided equally."""


class Account:
    """The time that one principal has used.

    Attributes:
        principal: Owner of the account.
        seen_ns: When its last request came.
        ahead: The time that its work takes at its share, beyond the time that has passed, in nanoseconds. Its next
            piece of work may begin when it is within a burst.
        loop_ns: Work on the event loop in this window. engine_ns: running sum of work on the engine thread, including
            steps that served it; written by the engine thread only. engine_read_ns: how much of it the event loop has
            counted in a window; host_read_ns: how much of ``host_ns`` it has charged.
        host_ns: Running sum of the engine's host work, less what belongs to appends; written by the engine thread only.
        demand: Share of the time of the last windows in which the server worked for it, from 0 to 1.
        rate: Share of the time that its work may take.
    """

    __slots__ = (
        "ahead",
        "demand",
        "engine_ns",
        "engine_read_ns",
        "host_ns",
        "host_read_ns",
        "loop_ns",
        "principal",
        "rate",
        "seen_ns",
    )

    def __init__(self, principal: str, now_ns: int) -> None:
        self.principal = principal
        self.seen_ns = now_ns
        self.ahead = Bucket(now_ns)
        self.loop_ns = self.engine_ns = self.engine_read_ns = self.host_ns = self.host_read_ns = 0
        self.demand = 0.0  # unknown: a new principal takes nothing from others before it is measured
        self.rate = 1.0


class Shares:
    """Accounts of all active principals.

    The methods :meth:`add_host_work` and :meth:`add_service` are called on the engine thread, all others on the event
    loop's thread. Each field has one writer, and the dictionary is only read as a copy, so there is no lock.

    Invariant: ``is_contended`` exactly while at least two accounts are kept, as of the last request or window. Accounts
    that are idle for a second are forgotten.

    Args:
        clock: Monotonic nanoseconds.

    Attributes:
        is_contended: Several principals are active; read from any thread.
    """

    def __init__(self, clock: Callable[[], int] = time.monotonic_ns) -> None:
        self._clock = clock
        self.is_contended = False
        self._accounts: dict[str, Account] = {}
        self._window_from_ns = clock()

    @property
    def num_accounts(self) -> int:
        """Number of active principals."""
        return len(self._accounts)

    # ---- on the event loop ------------------------------------------------------------------------------------------

    def account(self, principal: str) -> Account:
        """Return the account of a principal that sends a request now."""
        now_ns = self._clock()
        account = self._accounts.get(principal)
        if account is None:
            account = self._accounts[principal] = Account(principal, now_ns)
            self._divide()
        account.seen_ns = now_ns
        if now_ns - self._window_from_ns >= _WINDOW_NS:
            self._end_window(now_ns)
        return account

    def charge(self, principal: str, work_ns: int) -> None:
        """Count work that was done on the event loop for a principal."""
        account = self._accounts.get(principal)
        if account is not None and self.is_contended:
            account.loop_ns += work_ns
            account.ahead.pour(work_ns / account.rate, self._clock())

    def wait_ns(self, account: Account) -> int:
        """Return how long the principal's next piece of work has to wait; 0 or less: it may begin."""
        now_ns = self._clock()
        if now_ns - self._window_from_ns >= _WINDOW_NS:
            self._end_window(now_ns)
        if not self.is_contended:
            return 0
        if (host_ns := account.host_ns) != account.host_read_ns:
            account.ahead.pour((host_ns - account.host_read_ns) / account.rate, now_ns)
            account.host_read_ns = host_ns
        return int(account.ahead.settle(now_ns)) - _BURST_NS

    # ---- on the engine thread ---------------------------------------------------------------------------------------

    def add_host_work(self, principal: str, work_ns: int) -> None:
        """Count work of the engine for a principal, apart from rows."""
        account = self._accounts.get(principal)
        if account is not None:
            account.host_ns += work_ns
            account.engine_ns += work_ns

    def add_service(self, principals: Collection[str], elapsed_ns: int) -> None:
        """Count a step for the principals that have rows in it: each with its full time, undivided.

        The step is not charged. Each append in it accounts for some work for a request and a reply.

        Args:
            principals: The principal of each append in the step.
            elapsed_ns: Duration of the step.
        """
        num_appends: dict[str, int] = {}
        for principal in principals:  # a Counter takes ten times as long for one
            num_appends[principal] = num_appends.get(principal, 0) + 1
        for principal, count in num_appends.items():
            account = self._accounts.get(principal)
            if account is None:  # a long Generate, whose client sends nothing more
                account = self._accounts.setdefault(principal, Account(principal, self._clock()))
            account.engine_ns += elapsed_ns
            account.host_ns -= count * _APPEND_NS

    # ---- inner ------------------------------------------------------------------------------------------------------

    def _end_window(self, now_ns: int) -> None:
        """Measure the work for each principal since the last window, forget idle ones, and divide again."""
        length_ns = now_ns - self._window_from_ns
        self._window_from_ns = now_ns
        for account in list(self._accounts.values()):
            engine_ns = account.engine_ns
            busy_ns = account.loop_ns + engine_ns - account.engine_read_ns
            account.loop_ns, account.engine_read_ns = 0, engine_ns
            account.demand = min(1.0, 0.5 * account.demand + 0.5 * busy_ns / length_ns)
            if not busy_ns and now_ns - account.seen_ns > _ACTIVE_NS and account.ahead.settle(now_ns) <= _BURST_NS:
                del self._accounts[account.principal]
        self._divide()

    def _divide(self) -> None:
        """Give each principal the larger of an equal share and what the demands of the others leave."""
        accounts = list(self._accounts.values())
        total = sum(account.demand for account in accounts)
        num_counted = sum(account.demand > _LEAST_DEMAND for account in accounts)
        for account in accounts:
            num_others = num_counted - (account.demand > _LEAST_DEMAND)
            account.rate = max(_PART / (1 + num_others), 1.0 - (total - account.demand))
        self.is_contended = len(accounts) > 1
