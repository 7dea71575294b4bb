"""A client that is gone is no fault, and whatever is logged of a refusal holds nothing of what a client sent."""

from __future__ import annotations

import asyncio
import logging
from typing import Any, cast

import pytest
from grpc._cython import cygrpc  # type: ignore[attr-defined]

from ferrule_server import errors
from ferrule_server.api.rpc.calls import CallEnded, Context, refuse
from ferrule_server.api.rpc.status import code_of, fault_of, to_status
from ferrule_server.api.security.principal import Caller, enter
from ferrule_server.engine.faults.unexpected import fault
from ferrule_server.errors import FerruleError
from ferrule_server.log_format import set_up
from tests.api.test_status import TABLE

SECRET = 886_886
SAID = [error for error, *_ in TABLE.values()]
SAID += [
    errors.TokenOutOfVocab("input.input_ids[3]", SECRET, 256),
    errors.InvalidRequest("a", f"token {SECRET} is odd"),
]


class _Context:
    """A call of which nothing but its metadata is asked for."""

    def invocation_metadata(self) -> tuple[()]:
        """Return nothing."""
        return ()


@pytest.mark.parametrize("error", SAID, ids=lambda error: type(error).__name__)
def test_refusing_sends_nothing_by_itself(error: FerruleError, caplog: pytest.LogCaptureFixture) -> None:
    """The status is ready and the method over, whether the client is there or not; one line, without content."""
    caplog.set_level(logging.DEBUG, logger="ferrule_server")

    async def call() -> None:
        enter(Caller("alice"))
        refuse(cast("Context", _Context()), "Prefill", error)

    with pytest.raises(CallEnded) as ended:
        asyncio.run(call())
    assert (ended.value.status.code, ended.value.status.details) == (code_of(error), to_status(error).message)
    level = "INFO" if isinstance(error, errors.Starting) else "WARNING"  # each client waits for a server that starts
    assert [record.levelname for record in caplog.records] == [level]
    assert str(SECRET) not in caplog.text


@pytest.mark.parametrize("error", SAID, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("is_cause", [False, True])
def test_a_fault_met_while_refusing_tells_nothing_of_the_refusal(
    error: FerruleError, is_cause: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Python chains what was being handled to each traceback: refusals are cut out, faults stay."""
    for is_engine in (False, True):
        try:
            _fail_while_refusing(error, is_cause=is_cause)
        except RuntimeError as failure:
            said = fault("job failed") if is_engine else fault_of(failure, "Prefill")
            assert said.REASON == "ENGINE_FAULT"
    assert caplog.text.count("ValueError: the inner fault") == caplog.text.count("RuntimeError: the outer fault") == 2
    assert str(SECRET) not in caplog.text
    assert error.message not in caplog.text


def _fail_while_refusing(error: FerruleError, *, is_cause: bool) -> None:
    try:
        try:
            raise error
        except FerruleError as caught:
            raise ValueError("the inner fault") from (caught if is_cause else None)
    except ValueError as inner:
        inner.__suppress_context__ = False
        raise RuntimeError("the outer fault") from inner


def test_what_grpc_says_of_clients_that_are_gone_is_no_error(capsys: pytest.CaptureFixture[str]) -> None:
    """A reply that could not be written is logged by gRPC itself, with all that the handler met: one line at DEBUG."""
    root, noisy = logging.getLogger(), logging.getLogger("grpc._cython.cygrpc")
    handlers, level, filters, noisy_level = root.handlers[:], root.level, noisy.filters[:], noisy.level
    root.handlers.clear()
    try:
        set_up("info", "text")
        _log_as_grpc(noisy, cygrpc.ExecuteBatchError("gone"))
        assert capsys.readouterr().err == ""
        _log_as_grpc(noisy, ValueError("a bug"))
        assert "a bug" in capsys.readouterr().err
    finally:
        root.handlers[:], noisy.filters[:] = handlers, filters
        root.setLevel(level)
        noisy.setLevel(noisy_level)


def _log_as_grpc(logger: logging.Logger, failure: Any) -> None:
    try:
        raise failure
    except Exception:  # whatever a servicer raises: gRPC logs it in this way
        logger.exception("%s raised by servicer method [/ferrule.v1.ModelExecutorService/Prefill]", failure)
