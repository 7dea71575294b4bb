"""A call that names an instance is answered by that one, or refused before anything of it is looked at."""

from __future__ import annotations

from collections.abc import Iterator

import grpc
import pytest

from ferrule.v1 import admin_pb2, admin_pb2_grpc, executor_pb2
from ferrule_server.api.rpc.state import Phase
from ferrule_server.api.security.auth import OpenAccess
from tests.api.harness import INSTANCE, RunningServer, refused

KEY = "ferrule-instance"


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    """A server for all tests here."""
    with RunningServer(has_reflection=True) as running:
        yield running


def test_a_drain_for_another_server_drains_nothing(server: RunningServer) -> None:
    """Whoever answers says who it is and who was asked for; a drain cannot be taken back."""
    admin = admin_pb2_grpc.AdminServiceStub(server.channel)
    named = ((KEY, "ferrule-q"),)
    for call in (
        lambda: admin.Drain(admin_pb2.DrainRequest(), metadata=named, timeout=10),
        lambda: admin.Shutdown(admin_pb2.ShutdownRequest(), metadata=named, timeout=10),
    ):
        with refused() as refusals:
            call()
        refusal = refusals[0]
        assert (refusal.code, refusal.reason) == (grpc.StatusCode.ABORTED, "WRONG_INSTANCE")
        assert refusal.metadata == {"instance": "ferrule-q", "answered_by": INSTANCE}
        assert refusal.message == f"the call is for instance 'ferrule-q', but this is {INSTANCE!r}; send it there"
    assert server.state.phase is Phase.READY
    assert not server.server.asked_to_stop.is_set()


def test_the_instance_that_is_named_answers(server: RunningServer) -> None:
    """Also where the name is said twice; without one anybody does."""
    for metadata in ((), ((KEY, INSTANCE),), ((KEY, INSTANCE), (KEY, INSTANCE))):
        request = executor_pb2.GetStatusRequest()
        assert server.stub.GetStatus(request, metadata=metadata, timeout=10).status.instance == INSTANCE


@pytest.mark.parametrize("name", ["", " ", "Test", "test,test", "a b", "x" * 65, "y" * 4000])
def test_what_is_no_name_of_this_server_is_refused(server: RunningServer, name: str) -> None:
    """No server has such a name; the answer holds no more of it than a name may have."""
    with refused() as refusals:
        server.stub.GetStatus(executor_pb2.GetStatusRequest(), metadata=((KEY, name),), timeout=10)
    assert refusals[0].reason == "WRONG_INSTANCE"
    assert len(refusals[0].message) < 200
    assert len(refusals[0].metadata["instance"]) <= 64


def test_of_two_names_both_must_be_it(server: RunningServer) -> None:
    """A proxy may route by either."""
    for names in ((INSTANCE, "other"), ("other", INSTANCE)):
        with refused() as refusals:
            metadata = tuple((KEY, name) for name in names)
            server.stub.GetStatus(executor_pb2.GetStatusRequest(), metadata=metadata, timeout=10)
        assert refusals[0].metadata["instance"] == "other"


def test_the_name_is_looked_at_before_the_role() -> None:
    """Who was sent to the wrong server hears that, not that its token there is no admin's."""
    with RunningServer(access=OpenAccess(is_admin=False)) as server:
        drain = admin_pb2_grpc.AdminServiceStub(server.channel).Drain
        for metadata, reason in (((KEY, "other"),), "WRONG_INSTANCE"), (((KEY, INSTANCE),), "ROLE_REQUIRED"):
            with refused() as refusals:
                drain(admin_pb2.DrainRequest(), metadata=metadata, timeout=10)
            assert refusals[0].reason == reason
