# Written by client/generate_aio.py from client/ferrule_client/_batch.py: change that, then run it again.
"""Prompts, decodes or chunks of one unary call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ferrule.v1 import executor_pb2
from ferrule_client import _messages
from ferrule_client._messages import Append, Appended
from ferrule_client._retry import Attempts
from ferrule_client._route import by_instance
from ferrule_client._status import error_from_status
from ferrule_client._tip import Tip
from ferrule_client.aio._connection import Connection, Timeout
from ferrule_client.aio._exchange import Done, Exchange, as_answers
from ferrule_client.errors import ExecutorError

if TYPE_CHECKING:
    from ferrule_client.aio.cache import AsyncCache

__all__ = ["Batch"]


class Batch:
    """Sends the appends of many caches by one call for all, or by one for each instance that has some of them.

    Args:
        connection: Where to call.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    async def perform(
        self, caches: Sequence[AsyncCache | None], inputs: Sequence[Append], timeout: Timeout, *, is_patient: bool
    ) -> list[Appended | ExecutorError]:
        """Return what came of the appends, in their order.

        Args:
            caches: The cache of each; None: it makes a sequence.
            inputs: The appends, all of one kind.
            timeout: Seconds for everything together.
            is_patient: True: a server that went away is waited for.

        Raises:
            ExecutorError: The call as a whole failed. Where there are several, what one failed with is the answer to
                its items.
        """
        made = [one for one in inputs if _messages.creates(one)]
        attempts = self._connection.attempts(
            timeout,
            creates=bool(made),
            has_request_id=all(one.request_id for one in made),
            is_patient=is_patient,
        )
        return await Exchange(self._connection, self._send, attempts).perform(caches, inputs) if inputs else []

    async def _send(self, inputs: Sequence[Append], release: Sequence[Tip], done: Done, attempts: Attempts) -> None:
        """Send what has no answer in ``done`` yet."""
        assert not release  # that is for streams
        waiting = [place for place in range(len(inputs)) if place not in done]
        groups = by_instance([inputs[place] for place in waiting], self._instance_of)
        for group in groups.values():
            places = [waiting[one] for one in group]
            try:
                results = await self._call([inputs[place] for place in places], attempts)
            except ExecutorError as error:
                done.update(as_answers(error, places, len(groups)))
                continue
            for place, result in zip(places, results, strict=True):
                done[place] = result.output if result.HasField("output") else error_from_status(result.error)

    def _instance_of(self, sent: Append) -> str:
        return self._connection.instance_of_handle(sent.kv_cache)

    async def _call(
        self, inputs: Sequence[Append], attempts: Attempts
    ) -> Sequence[executor_pb2.PrefillResult | executor_pb2.DecodeResult]:
        stub, run = self._connection.executor, self._connection
        request = _messages.batch_request(inputs)
        if isinstance(request, executor_pb2.BatchPrefillRequest):
            return (await run.run(stub.BatchPrefill, request, attempts)).results
        if isinstance(request, executor_pb2.BatchDecodeRequest):
            return (await run.run(stub.BatchDecode, request, attempts)).results
        return (await run.run(stub.UnifiedDecode, request, attempts)).results
