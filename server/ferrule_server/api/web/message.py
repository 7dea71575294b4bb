"""What the page is told each second: where the server is in its life and, once the model is loaded, its view."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from typing import Any, Final

from google.protobuf import json_format

from ferrule.v1 import admin_pb2
from ferrule_server.api.rpc.state import ServerState
from ferrule_server.errors import FerruleError

_LOG = logging.getLogger(__name__)

VIEW_REQUEST: Final = admin_pb2.GetServerViewRequest(max_cells=2048, max_sequences=1024, max_principals=32)
"""What the page has room for."""

_NOT_SHOWN: Final = "The server's view could not be read; the log tells why"


class PageMessage:
    """Makes the messages of the page; on the thread that calls it.

    Args:
        state: The server.
        ask: Returns the view once the model is loaded; may wait, and raise TimeoutError when the server is too busy,
            or an error of the contract where there is none.
    """

    def __init__(self, state: ServerState, ask: Callable[[], admin_pb2.ServerView]) -> None:
        self._state = state
        self._ask = ask
        self._has_failed = False

    def __call__(self) -> bytes:
        """Return one server-sent event in JSON; the view in it is the ``ServerView`` of the contract."""
        state = self._state
        told: dict[str, Any] = {
            "run": str(state.start_ns),
            "instance": state.instance,
            "version": state.version,
            "phase": state.phase.value,
        }
        if state.serving is None:
            told["load"] = {"stage": state.load_stage, "share": round(state.load_progress, 3)}
        else:
            told |= self._view()
        return b"data: " + json.dumps(told, separators=(",", ":")).encode() + b"\n\n"

    def _view(self) -> dict[str, Any]:
        try:
            view = json_format.MessageToDict(self._ask(), preserving_proto_field_name=True)
        except TimeoutError:
            return {"problem": "The server is too busy to answer"}
        except FerruleError as error:
            return {"problem": error.message}
        except Exception:  # noqa: BLE001  (the page says so, the log why; the metrics go on)
            if not self._has_failed:
                _LOG.exception("no view for the page")
            self._has_failed = True
            return {"problem": _NOT_SHOWN}
        self._has_failed = False
        return {"view": view}
