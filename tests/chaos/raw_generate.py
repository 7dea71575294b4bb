"""Clients made of the generated stubs alone that let the server draw, and go on after each break from what they read.

They know two rules. Where a branch was heard of, its last handle and token say where to go on; where none was, the
request is repeated as it was, and its ``request_id`` finds what it made.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import grpc

from ferrule.v1 import executor_pb2, types_pb2
from tests.chaos.model_policies import Policy, Tokens
from tests.chaos.raw_clients import LASTING, StubClient

_ATTEMPT_S = 5.0
_LOOP_S = 120.0


@dataclass
class Branch:
    """One continuation as its client knows it: what it read, and the handle that came with the last of it."""

    tokens: list[int] = field(default_factory=list)
    handle: types_pb2.KvCacheHandle | None = None
    is_over: bool = False


@dataclass
class LoopSession:
    """One prompt that the server goes on with, in one or several branches.

    Attributes:
        policy: Drawn with a seed of the session's own.
        on_stale: With which a broken loop is resumed.
        length: Tokens to draw for each branch.
    """

    name: str
    prompt: Tokens
    policy: Policy
    on_stale: types_pb2.StalePolicy
    length: int
    branches: list[Branch]
    num_resumed: int = 0

    def request(self) -> executor_pb2.GenerateRequest:
        """Return the request that begins it, always the same one."""
        return executor_pb2.GenerateRequest(
            request_id=self.name,
            input_ids=self.prompt,
            logits_policy=self.policy.message(),
            cache=LASTING,
            max_tokens=self.length,
            ignore_eos=True,
            n=len(self.branches),
        )

    def rest(self, index: int) -> executor_pb2.GenerateRequest:
        """Return the request that goes on with one branch."""
        branch = self.branches[index]
        policy = Policy(self.policy.kind, (self.policy.seed + index) % (1 << 64), self.policy.shape)
        return executor_pb2.GenerateRequest(
            input_ids=branch.tokens[-1:],
            kv_cache=branch.handle,
            logits_policy=policy.message(),
            on_stale=self.on_stale,
            max_tokens=self.length - len(branch.tokens),
            ignore_eos=True,
        )

    @property
    def sent(self) -> list[list[int]]:
        """Tokens that the sequences should hold."""
        return [[*self.prompt, *branch.tokens[:-1]] for branch in self.branches]


class LoopClient(StubClient):
    """Runs sessions one after the other."""

    patience_s = _LOOP_S

    def run(self, session: LoopSession) -> None:
        """Have every branch drawn to its end."""
        deadline = time.monotonic() + self.patience_s
        while not all(branch.handle for branch in session.branches):
            for branch in session.branches:  # whatever was heard comes again
                branch.tokens, branch.handle, branch.is_over = [], None, False
            self._read(session.request(), session.branches)
            assert time.monotonic() < deadline, "no connection lasted long enough"
        for index, branch in enumerate(session.branches):
            while not branch.is_over:
                session.num_resumed += 1
                self._read(session.rest(index), [branch])
                assert time.monotonic() < deadline, "no connection lasted long enough"

    def _read(self, request: executor_pb2.GenerateRequest, branches: Sequence[Branch]) -> None:
        """Read until the call ends or breaks."""
        try:
            for frame in self._stub.Generate(request, timeout=_ATTEMPT_S):
                for output in frame.outputs:
                    self._breaks.replayed += output.replayed
                    branch = branches[output.index]
                    assert not output.HasField("error"), output.error
                    assert output.outputs.tokens
                    branch.tokens += output.outputs.tokens
                    branch.handle = output.resume_from
                    branch.is_over = output.finish_reason == executor_pb2.FINISH_REASON_MAX_TOKENS
        except grpc.RpcError as error:
            self._breaks.note(error)
