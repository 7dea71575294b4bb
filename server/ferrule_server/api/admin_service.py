"""AdminService: in the contract, not served yet; SIGTERM drains the server.

``handlers.ROLES`` names the role that every method of it needs: who lacks it learns nothing else.
"""

from __future__ import annotations

from ferrule.v1 import admin_pb2_grpc
from ferrule_server.api.calls import not_served
from ferrule_server.api.state import ServerState


class AdminServicer(admin_pb2_grpc.AdminServiceServicer):
    """Refuses every operation: none is served yet.

    Args:
        state: The server.
    """

    def __init__(self, state: ServerState) -> None:
        self.state = state

    Warmup = not_served("Warmup")
    Drain = not_served("Drain")
    Shutdown = not_served("Shutdown")
