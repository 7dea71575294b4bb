"""``python -m ferrule_server`` as a process: ready line, signals, exit codes, addresses in use."""

from __future__ import annotations

import itertools
import os
import queue
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_status import rpc_status

from ferrule.v1 import (
    admin_pb2,
    admin_pb2_grpc,
    cache_pb2,
    executor_pb2,
    executor_pb2_grpc,
    info_pb2,
    types_pb2,
)
from ferrule_server import __version__
from tests.api.certificates import Authority, ServerFiles
from tests.api.harness import GREEDY
from tests.terminal import Terminal

REFERENCE = ("--executor", "paged-reference", "--kv-memory", "4MiB")
QUIET = ("--log-level", "error")


def _command(*arguments: str) -> list[str]:
    return [sys.executable, "-W", "error", "-m", "ferrule_server", *arguments]


def _environment(**variables: str) -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith("FERRULE_")} | variables


def _run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run to the end, which must come by itself."""
    return subprocess.run(
        _command(*arguments), capture_output=True, text=True, timeout=60, env=_environment(), check=False
    )


@contextmanager
def _running(
    *arguments: str, command: Sequence[str] = (), **variables: str
) -> Iterator[tuple[subprocess.Popen[str], dict[str, str]]]:
    """Start a server, wait for its ready line and give the process and the line's values."""
    with subprocess.Popen(
        [*command, *arguments] if command else _command(*arguments),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=_environment(**variables),
    ) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            assert line.startswith("ready "), process.communicate(timeout=10)
            yield process, dict(part.split("=", 1) for part in line.split()[1:])
        finally:
            if process.poll() is None:
                process.kill()


def _end(process: subprocess.Popen[str], number: int = signal.SIGTERM) -> tuple[str, str]:
    """Send a signal and return what is left on stdout and stderr."""
    process.send_signal(number)
    out, err = process.communicate(timeout=20)
    return out, err


def test_ready_line_names_the_address_and_sigterm_ends_with_0() -> None:
    """Port 0 becomes a real port, one line on stdout and no more, a clean end."""
    with _running(*REFERENCE, "--listen", "127.0.0.1:0", "--instance", "box-1") as (process, values):
        assert values["executor"] == values["model"] == "paged-reference"
        assert (values["instance"], values["device"]) == ("box-1", "cpu")
        with grpc.insecure_channel(values["listen"]) as channel:
            stub = executor_pb2_grpc.ModelExecutorServiceStub(channel)
            status = stub.GetStatus(executor_pb2.GetStatusRequest(), timeout=10).status
            assert status.is_ready
            assert status.server_version == __version__
            assert status.free_blocks == int(values["blocks"])
        out, err = _end(process)
    assert process.returncode == 0
    assert out == ""
    assert "drained" in err
    assert "Traceback" not in err


def test_settings_come_from_the_environment_and_ctrl_c_ends_with_0(tmp_path: Path) -> None:
    """A unix socket by variable; nothing is left in its folder."""
    variables = {"FERRULE_LISTEN": f"unix:{tmp_path}/f.sock", "FERRULE_EXECUTOR": "paged-reference"}
    with _running(**variables) as (process, values):
        assert values["listen"] == variables["FERRULE_LISTEN"]
        _end(process, signal.SIGINT)
    assert process.returncode == 0
    assert list(tmp_path.iterdir()) == []


def test_grpc_knows_the_listener_that_is_asked_for() -> None:
    """A name that gRPC does not know makes it write a line. A variable that is already set is kept."""
    code = (
        "import os; from ferrule_server import arguments, process\n"
        "process.set_up(arguments.parse_config([], {}))\n"
        "import grpc; grpc.insecure_channel('unix:nobody'); print(os.environ['GRPC_EXPERIMENTS'])"
    )
    for given, used in (({}, "-event_engine_listener\n"), ({"GRPC_EXPERIMENTS": "other"}, "other\n")):
        run = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, env=_environment(**given), check=True
        )
        assert run.stdout == used
        assert ("Unknown experiment: other" in run.stderr) == bool(given)
        assert given or not run.stderr


@pytest.mark.parametrize("has_tls", [False, True], ids=["plain", "tls"])
def test_idle_connections_do_not_hold_the_server(tmp_path: Path, *, has_tls: bool) -> None:
    """One that is connected and asks nothing, and one that never says hello, cost the end a moment and no more."""
    authority, files = Authority(), ServerFiles(tmp_path)
    files.write(authority.server(), authority.cert)
    flags = ("--tls-cert", str(files.paths[0]), "--tls-key", str(files.paths[1])) if has_tls else ()
    with (
        _running(*REFERENCE, *flags, "--listen", "127.0.0.1:0") as (process, values),
        socket.create_connection(("127.0.0.1", int(values["listen"].rpartition(":")[2]))),
        _channel(values["listen"], authority.cert if has_tls else None) as channel,
    ):
        grpc.channel_ready_future(channel).result(timeout=10)
        started = time.monotonic()
        _end(process)
        assert process.returncode == 0
        assert time.monotonic() - started < 10, "the grace is 25 s"


def _channel(target: str, authority: bytes | None) -> grpc.Channel:
    if authority is None:
        return grpc.insecure_channel(target)
    return grpc.secure_channel(target, grpc.ssl_channel_credentials(authority))


def test_an_idle_stream_does_not_hold_the_server() -> None:
    """It ends with DRAINING at once, and the process long before its grace."""
    frames: queue.SimpleQueue[executor_pb2.StreamDecodeRequest | None] = queue.SimpleQueue()
    with (
        _running(*REFERENCE, "--listen", "127.0.0.1:0") as (process, values),
        grpc.insecure_channel(values["listen"]) as channel,
    ):
        stub = executor_pb2_grpc.ModelExecutorServiceStub(channel)
        call = stub.StreamDecode(iter(frames.get, None))
        frames.put(executor_pb2.StreamDecodeRequest())
        next(call)
        time.sleep(0.3)
        started = time.monotonic()
        _end(process)
        assert process.returncode == 0
        assert time.monotonic() - started < 10, "the grace is 25 s"
        with pytest.raises(grpc.RpcError) as caught:
            next(call)
        assert "going down" in (caught.value.details() or "")
        frames.put(None)


def _prefill(channel: grpc.Channel) -> types_pb2.KvCacheHandle:
    message = executor_pb2.PrefillInput(input_ids=[1, 2, 3], logits_policy=GREEDY)
    stub = executor_pb2_grpc.ModelExecutorServiceStub(channel)
    return stub.Prefill(executor_pb2.PrefillRequest(input=message), timeout=10).output.kv_cache


def _decode(channel: grpc.Channel, handle: types_pb2.KvCacheHandle) -> types_pb2.KvCacheHandle:
    message = executor_pb2.DecodeInput(kv_cache=handle, input_ids=[7], logits_policy=GREEDY)
    stub = executor_pb2_grpc.ModelExecutorServiceStub(channel)
    return stub.Decode(executor_pb2.DecodeRequest(input=message), timeout=10).output.kv_cache


def _decode_for_ever(channel: grpc.Channel, handle: types_pb2.KvCacheHandle) -> None:
    while True:
        handle = _decode(channel, handle)
        time.sleep(0.005)  # or a fast machine fills the context before the grace is over


def _reason_of(error: grpc.RpcError) -> str:
    status = rpc_status.from_call(error)
    assert status is not None, str(error)
    info = error_details_pb2.ErrorInfo()
    assert status.details[0].Unpack(info)
    return str(info.reason)


def test_live_handles_are_served_after_sigterm_until_the_last_is_released() -> None:
    """The process waits for them, over connections made meanwhile too, and ends with 0 as soon as none is left."""
    with _running(*REFERENCE, "--listen", "127.0.0.1:0", "--drain-grace", "60s") as (process, values):
        with grpc.insecure_channel(values["listen"]) as channel:
            handle = _prefill(channel)
            process.send_signal(signal.SIGTERM)
            stub = executor_pb2_grpc.ModelExecutorServiceStub(channel)
            while stub.GetStatus(executor_pb2.GetStatusRequest(), timeout=10).status.is_ready:
                handle = _decode(channel, handle)
            with pytest.raises(grpc.RpcError) as caught:
                _prefill(channel)
            assert _reason_of(caught.value) == "DRAINING"
        with grpc.insecure_channel(values["listen"], [("grpc.use_local_subchannel_pool", 1)]) as channel:
            handle = _decode(channel, handle)
            stub = executor_pb2_grpc.ModelExecutorServiceStub(channel)
            assert process.poll() is None
            stub.ReleaseCache(cache_pb2.ReleaseCacheRequest(kv_caches=[handle]), timeout=10)
        _, err = process.communicate(timeout=20)
    assert process.returncode == 0
    assert "grace over" not in err
    assert "Traceback" not in err


@pytest.mark.parametrize("by", ["signal", "administrator"])
def test_the_grace_ends_with_unavailable_and_0(by: str) -> None:
    """Handles that are never released are served until it is over: --drain-grace, or that of Shutdown."""
    grace = "300ms" if by == "signal" else "60s"
    with (
        _running(*REFERENCE, "--listen", "127.0.0.1:0", "--drain-grace", grace) as (process, values),
        grpc.insecure_channel(values["listen"]) as channel,
    ):
        handle = _prefill(channel)
        if by == "signal":
            process.send_signal(signal.SIGTERM)
        else:
            request = admin_pb2.ShutdownRequest(grace=Duration(nanos=400_000_000))
            reply = admin_pb2_grpc.AdminServiceStub(channel).Shutdown(request, timeout=10)
            assert reply.live_sequences == 1
        with pytest.raises(grpc.RpcError) as caught:
            _decode_for_ever(channel, handle)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        _, err = process.communicate(timeout=20)
    assert process.returncode == 0
    assert "grace over live_sequences=1" in err
    assert "Traceback" not in err


@pytest.mark.parametrize("delay_s", [0.0, 0.02, 0.06, 0.15])
def test_a_signal_that_comes_while_a_shutdown_ends_the_process_changes_nothing(delay_s: float) -> None:
    """It is the first one, so there is nothing to hurry: whoever watches sees 0, at whatever moment it comes."""
    with (
        _running(*REFERENCE, "--listen", "127.0.0.1:0") as (process, values),
        grpc.insecure_channel(values["listen"]) as channel,
    ):
        admin_pb2_grpc.AdminServiceStub(channel).Shutdown(admin_pb2.ShutdownRequest(), timeout=10)
        assert process.stderr is not None
        while "drained" not in process.stderr.readline():
            assert process.poll() is None
        time.sleep(delay_s)
        process.send_signal(signal.SIGTERM)  # where the process is gone already, this does nothing
        process.communicate(timeout=20)
    assert process.returncode == 0


def test_a_process_that_an_administrator_drains_stays_until_it_is_told_to_end() -> None:
    """By a signal here: the handle that was waited for is served till then, and SIGTERM sets a grace of its own."""
    with (
        _running(*REFERENCE, "--listen", "127.0.0.1:0", "--drain-grace", "100ms") as (process, values),
        grpc.insecure_channel(values["listen"]) as channel,
    ):
        handle = _prefill(channel)
        admin = admin_pb2_grpc.AdminServiceStub(channel)
        admin.Drain(admin_pb2.DrainRequest(grace=Duration(seconds=60)), timeout=10)
        with pytest.raises(grpc.RpcError) as caught:
            _prefill(channel)
        assert _reason_of(caught.value) == "DRAINING"
        time.sleep(0.5)
        _decode(channel, handle)
        assert process.poll() is None
        _, err = _end(process)
    assert process.returncode == 0
    assert "Traceback" not in err


def test_contents_are_logged_only_where_that_was_asked_for_and_said() -> None:
    """One WARNING at the start, then the best tokens of every row with handle, position and path."""
    for flags in ((), ("--debug-top-tokens",)):
        with (
            _running(*REFERENCE, "--listen", "127.0.0.1:0", *flags) as (process, values),
            grpc.insecure_channel(values["listen"]) as channel,
        ):
            handle = _prefill(channel)
            _decode(channel, handle)
            stub = executor_pb2_grpc.ModelExecutorServiceStub(channel)
            stub.ReleaseCache(cache_pb2.ReleaseCacheRequest(kv_caches=[handle]), timeout=10)
            _, err = _end(process)
        warnings = [line for line in err.splitlines() if "debug_top_tokens=on" in line and "WARNING" in line]
        assert len(warnings) == len(flags)
        rows = re.findall(r"INFO .* handle_id=(\w+) position=(\d) path=paged-reference token=\S+ best=\d+:", err)
        assert [position for _, position in rows] == (["3", "4"] if flags else [])
        assert all(handle_id == "new" or len(handle_id) == 16 for handle_id, _ in rows)


@pytest.mark.slow
def test_calls_whose_step_outlives_the_drain_are_answered() -> None:
    """Nobody is left with a CANCELLED, which does not say whether to try again."""
    codes: list[grpc.StatusCode] = []

    def decode_until_refused(channel: grpc.Channel, handle: types_pb2.KvCacheHandle) -> None:
        with pytest.raises(grpc.RpcError) as caught:
            _decode_for_ever(channel, handle)
        codes.append(caught.value.code())

    long_step = ("--drain-grace", "0s", "--failpoints", "after_schedule=sleep(3000)@200")
    with (
        _running(*REFERENCE, "--listen", "127.0.0.1:0", *long_step) as (process, values),
        grpc.insecure_channel(values["listen"]) as channel,
    ):
        handles = [_prefill(channel) for _ in range(12)]
        clients = [threading.Thread(target=decode_until_refused, args=(channel, handle)) for handle in handles]
        for client in clients:
            client.start()
        time.sleep(0.7)  # by then the long step runs; should it not, there is less to see
        _end(process)
        for client in clients:
            client.join(timeout=20)
    assert process.returncode == 0
    assert codes == [grpc.StatusCode.UNAVAILABLE] * 12


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_does_not_wait_for_live_handles(number: int) -> None:
    """The first signal waits for the handle, the second one ends the process at once."""
    with (
        _running(*REFERENCE, "--listen", "127.0.0.1:0") as (process, values),
        grpc.insecure_channel(values["listen"]) as channel,
    ):
        _prefill(channel)
        process.send_signal(signal.SIGTERM)
        stub = executor_pb2_grpc.ModelExecutorServiceStub(channel)
        while stub.GetStatus(executor_pb2.GetStatusRequest(), timeout=10).status.is_ready:
            assert process.poll() is None
        process.send_signal(number)
        assert process.wait(timeout=5) == 128 + number


def test_a_server_in_the_background_ends_with_sigterm() -> None:
    """A shell ignores SIGINT for what a script starts there."""
    command = ["sh", "-c", "trap '' INT; exec \"$@\"", "sh", *_command(*REFERENCE)]
    with _running("--listen", "127.0.0.1:0", command=command) as (process, _):
        _, err = _end(process)
    assert process.returncode == 0, err


def test_ctrl_c_at_a_terminal_says_what_it_waits_for() -> None:
    """And that a second one stops at once."""
    command = _command(*REFERENCE, "--listen", "127.0.0.1:0", "--log-level", "error")
    with Terminal(command, _environment()) as terminal:
        terminal.read_until("\n", terminal.read_until("ready "))
        (listen,) = re.findall(r"ready .*?listen=(\S+)", terminal.seen)
        with grpc.insecure_channel(listen) as channel:
            _prefill(channel)
        terminal.process.send_signal(signal.SIGINT)
        terminal.read_until("stops at once")
        terminal.process.send_signal(signal.SIGINT)
        assert terminal.end() == 130
    assert "serving 1 live handle for up to 25 s more; Ctrl-C stops at once" in terminal.seen


def test_reading_a_journal_is_a_stage_of_the_start(tmp_path: Path) -> None:
    """As it may take seconds; the first server has none to read."""
    for _ in range(2):
        with _running(*REFERENCE, "--listen", "127.0.0.1:0", "--durable", str(tmp_path / "journal")) as (process, _):
            _, err = _end(process)
    assert "loading stage='reading the journal' progress=0.9" in err
    assert err.index("reading the journal") < err.index("journal read ")


_FAULTY = """
import atexit, os, sys
from ferrule_server.__main__ import main
from ferrule_server.executor.base import DeviceLost
from ferrule_server.executor.reference import PagedReferenceExecutor

run, num_runs = PagedReferenceExecutor.run, [0]

def run_twice(self, batch):
    num_runs[0] += 1
    if num_runs[0] > 2:
        raise DeviceLost("device gone")
    return run(self, batch)

PagedReferenceExecutor.run = run_twice
atexit.register(os.abort)  # what a GPU's libraries do at the end of a process whose context is broken
sys.exit(main())
"""


def test_a_device_fault_loses_the_handles_turns_health_and_ends_with_1() -> None:
    """HANDLE_LOST for what ran, NOT_SERVING to watchers, exit code 1, well before any grace."""
    command = [sys.executable, "-W", "error", "-c", _FAULTY, *REFERENCE]
    with _running("--listen", "127.0.0.1:0", command=command) as (process, values):
        with grpc.insecure_channel(values["listen"]) as channel:
            watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(), timeout=20)
            assert next(watch).status == health_pb2.HealthCheckResponse.SERVING
            handle = _decode(channel, _prefill(channel))
            with pytest.raises(grpc.RpcError) as caught:
                _decode(channel, handle)
            assert _reason_of(caught.value) == "HANDLE_LOST"
            assert next(watch).status == health_pb2.HealthCheckResponse.NOT_SERVING
            _, err = process.communicate(timeout=20)
        assert process.returncode == 1
        assert "every handle is lost" in err


_FAILING_THREAD = """
import ctypes
import sys
from ferrule_server.__main__ import main
from ferrule_server.executor.cpu.workers import Workers
from ferrule_server.kernels.cpu.sync import _IS_ABORTED

run_step, num_steps = Workers.run_step, [0]

def run_some(self):
    num_steps[0] += 1
    if num_steps[0] == %d:
        run = self._run

        def fail(thread):
            if thread:
                raise RuntimeError("no such page")
            return run(thread)

        self.close()
        ctypes.c_int64.from_address(self._sync.address + _IS_ABORTED).value = 0  # closing has aborted it
        self.__init__(fail, 2, self._sync)
    return run_step(self)

Workers.run_step = run_some
sys.exit(main())
"""
"""A server of which a thread ends in some step."""

_Decoded = tuple[int, types_pb2.KvCacheHandle]


def _greedy(channel: grpc.Channel, handle: types_pb2.KvCacheHandle, token: int) -> Iterator[_Decoded]:
    """Yield greedy tokens, each with the handle after the one that it follows."""
    stub = executor_pb2_grpc.ModelExecutorServiceStub(channel)
    while True:
        message = executor_pb2.DecodeInput(kv_cache=handle, input_ids=[token], logits_policy=GREEDY)
        output = stub.Decode(executor_pb2.DecodeRequest(input=message), timeout=60).output
        token, handle = output.outputs.tokens[0], output.kv_cache
        yield token, handle


def test_a_fault_in_the_kernels_of_the_processor_ends_with_1_and_durable_handles_go_on(tmp_path: Path) -> None:
    """One line says what failed. The process after it continues a handle with the tokens of one that never failed."""
    model = ("--executor", "numba-cpu", "--model", "demo", "--threads", "2", "--kv-memory", "16MiB")
    flags = (*model, "--durable", str(tmp_path / "journal"), "--listen", "127.0.0.1:0", "--instance", "box-1")
    found: list[_Decoded] = []
    with _running(*flags, command=[sys.executable, "-c", _FAILING_THREAD % 6]) as (process, values):
        assert values["executor"] == "numba-cpu"
        with grpc.insecure_channel(values["listen"]) as channel:
            with pytest.raises(grpc.RpcError):
                found += _greedy(channel, _prefill(channel), 7)
            _, err = process.communicate(timeout=20)
    assert process.returncode == 1
    lines = [line for line in err.splitlines() if "DeviceLost: the kernels of the processor failed: a thread" in line]
    assert len(lines) == 1
    assert len(found) >= 2
    with _running(*flags) as (process, values), grpc.insecure_channel(values["listen"]) as channel:
        expected = list(itertools.islice(_greedy(channel, _prefill(channel), 7), 12))
        token, handle = found[-1]
        found += itertools.islice(_greedy(channel, handle, token), 12 - len(found))
        _end(process)
    assert [token for token, _ in found] == [token for token, _ in expected]


def _before_all_else(folder: Path) -> str:
    return f"{folder}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"


@pytest.fixture
def slow_torch(tmp_path: Path) -> dict[str, str]:
    """Variables with which importing torch takes a minute."""
    hidden = tmp_path / "torch"
    hidden.mkdir()
    (hidden / "__init__.py").write_text("import time; time.sleep(60)")
    return _environment(PYTHONPATH=_before_all_else(tmp_path))


def _wait_until_it_loads(socket_path: Path) -> None:
    with grpc.insecure_channel(f"unix:{socket_path}") as channel:
        stub = executor_pb2_grpc.ModelExecutorServiceStub(channel)
        stage = ""
        while stage != "importing torch":
            status = stub.GetStatus(executor_pb2.GetStatusRequest(), timeout=20, wait_for_ready=True).status
            assert status.state == info_pb2.EXECUTOR_STATE_STARTING
            stage = status.load_stage


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_while_it_loads_the_status_tells_the_stage_and_a_signal_ends_it(
    number: int, code: int, tmp_path: Path, slow_torch: dict[str, str]
) -> None:
    """The address is bound first; a signal does not wait for the thread that loads."""
    socket_path = tmp_path / "f.sock"
    with subprocess.Popen(
        _command("--listen", f"unix:{socket_path}"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=slow_torch,
    ) as process:
        _wait_until_it_loads(socket_path)
        started = time.monotonic()
        out, err = _end(process, number)
        assert process.returncode == code, err
        assert out == ""
        assert time.monotonic() - started < 10
    assert not socket_path.exists()


@pytest.mark.parametrize(("module", "place"), [("__main__", "parse_config"), ("composition", "failpoints_of")])
def test_ctrl_c_while_it_starts_is_no_traceback(module: str, place: str) -> None:
    """Before the loop runs, and during the imports before the address is bound."""
    code = f"""
import os, signal, sys
from ferrule_server import __main__ as server, {module} as module
call = module.{place}
def interrupted(*arguments):
    os.kill(os.getpid(), signal.SIGINT)
    return call(*arguments)
module.{place} = interrupted
sys.exit(server.main(["--executor", "paged-reference", "--listen", "127.0.0.1:0"]))
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, env=_environment(), check=False
    )
    assert done.returncode == 130, done.stderr
    assert "Traceback" not in done.stderr


def test_ctrl_c_while_it_loads_leaves_the_terminal_as_it_was(tmp_path: Path, slow_torch: dict[str, str]) -> None:
    """The bar is wiped, the cursor is back and stands at the start of a line."""
    socket_path = tmp_path / "f.sock"
    command = _command("--listen", f"unix:{socket_path}")
    with Terminal(command, slow_torch | {"TERM": "xterm"}) as terminal:
        _wait_until_it_loads(socket_path)
        terminal.read_until("importing torch")
        terminal.process.send_signal(signal.SIGINT)
        assert terminal.end() == 130
    shown = terminal.seen
    assert shown.rindex("\x1b[?25h") > shown.rindex("\x1b[?25l")
    assert shown[shown.rindex("importing torch") :].endswith("\x1b[2K")


def test_the_log_does_not_run_into_the_bar() -> None:
    """While a server loads, a line of the log begins where the bar was wiped, and is not broken at 80 cells."""
    code = f"""\
import logging, time
from ferrule_server import console, log_format
log_format.set_up("info", "text")
with console.bar() as show:
    show("reading", 0.5)
    time.sleep(0.3)
    logging.info("{"long " * 20}")
    time.sleep(0.3)
logging.info("afterwards")
"""
    with Terminal([sys.executable, "-c", code], _environment() | {"TERM": "xterm"}) as terminal:
        assert terminal.end() == 0
    assert "reading" in terminal.seen
    assert re.search(rf"\x1b\[2K[0-9-]+ [0-9:,]+ INFO root {'long ' * 20}\r\n", terminal.seen)
    assert terminal.seen.endswith("INFO root afterwards\r\n")


def test_a_port_in_use_ends_with_2_and_one_sentence() -> None:
    """Before anything is loaded, and the first server goes on."""
    with _running(*REFERENCE, "--listen", "127.0.0.1:0") as (process, values):
        second = _run("--listen", values["listen"])
        assert second.returncode == 2
        assert second.stdout == ""
        assert "another server uses it" in second.stderr
        assert "Traceback" not in second.stderr
        assert "torch" not in second.stderr
        assert process.poll() is None


def test_a_socket_path_in_use_is_refused_and_a_stale_one_replaced(tmp_path: Path) -> None:
    """A killed server leaves its socket and lock file behind; the next one takes over."""
    listen = ("--listen", f"unix:{tmp_path}/f.sock")
    with _running(*REFERENCE, *listen) as (process, _):
        second = _run(*REFERENCE, *listen)
        assert second.returncode == 2
        assert "another server uses it" in second.stderr
        process.kill()
        process.wait(timeout=10)
        assert (tmp_path / "f.sock").exists()
        with _running(*REFERENCE, *listen) as (third, values):
            assert values["listen"] == listen[1]
            _end(third)
        assert third.returncode == 0


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (("--listen", "127.0.0.1:0", "--token-file", "/nowhere/tokens"), "--token-file /nowhere/tokens: No such file"),
        (("--listen", "127.0.0.1:0", "--tls-cert", "/c", "--tls-key", "/k"), "--tls-key /k: No such file"),
        (("--model", "/nowhere/at/all", "--listen", "127.0.0.1:0", *QUIET), "no such folder"),
        ((*REFERENCE[:2], "--kv-memory", "64KiB", "--listen", "unix:/nowhere/f.sock", *QUIET), "No such file"),
    ],
)
def test_unusable_settings_end_with_2_and_one_line(arguments: tuple[str, ...], hint: str) -> None:
    """The line says what would do."""
    run = _run(*arguments)
    assert run.returncode == 2
    assert run.stderr.count("\n") == 1
    assert hint in run.stderr


@pytest.mark.parametrize("pool", ["1TiB", "64KiB"])
def test_a_pool_that_cannot_be_is_refused_before_weights_are_read(pool: str) -> None:
    """Exit code 2 after torch is imported; what does not fit comes with a table."""
    run = _run("--kv-memory", pool, "--device", "cpu", "--listen", "127.0.0.1:0")
    assert (run.returncode, run.stdout) == (2, "")
    assert "importing torch" in run.stderr
    assert "reading weights" not in run.stderr
    assert "Traceback" not in run.stderr
    if pool == "1TiB":
        assert re.search(r"^  KV pool +1024\.00 GiB  --kv-memory$", run.stderr, re.MULTILINE)
        assert re.search(r"^  available +[\d.]+ GiB  of [\d.]+ GiB: this machine$", run.stderr, re.MULTILINE)


_IN_A_GROUP = """
import functools, pathlib, sys
from ferrule_server import __main__, loading
from ferrule_server.host import Host

loading.create_executor = functools.partial(loading.create_executor, host=Host(pathlib.Path(sys.argv.pop(1))))
sys.exit(__main__.main())
"""


def test_a_pool_beyond_the_control_group_ends_with_2(tmp_path: Path) -> None:
    """In place of a process that the kernel kills, and that is started again and again."""
    group = tmp_path / "sys/fs/cgroup/memory"
    group.mkdir(parents=True)
    (group / "memory.limit_in_bytes").write_text(f"{1200 << 20}\n")
    (tmp_path / "proc/self").mkdir(parents=True)
    mount = "35 31 0:32 /docker/abc /sys/fs/cgroup/memory ro - cgroup cgroup rw,memory\n"
    (tmp_path / "proc/self/mountinfo").write_text(mount)
    (tmp_path / "proc/self/cgroup").write_text("4:memory:/docker/abc\n")
    command = [sys.executable, "-c", _IN_A_GROUP, str(tmp_path), "--kv-memory", "2GiB", "--listen", "127.0.0.1:0"]
    run = subprocess.run(
        [*command, "--device", "cpu"], env=_environment(), check=False, capture_output=True, text=True, timeout=100
    )
    assert (run.returncode, run.stdout) == (2, ""), run.stderr
    assert "reading weights" not in run.stderr
    assert "of 1.17 GiB: /sys/fs/cgroup/memory/memory.limit_in_bytes" in run.stderr
    assert "lower --kv-memory to 9" in run.stderr


@pytest.mark.parametrize("name", ["file", "file/journal"])
def test_a_journal_that_cannot_be_is_refused_before_torch_is_imported(name: str, tmp_path: Path) -> None:
    """Nothing is loaded for a path that could not be used."""
    (tmp_path / "file").touch()
    run = _run("--durable", str(tmp_path / name), "--listen", "127.0.0.1:0")
    assert (run.returncode, run.stdout) == (2, "")
    problem = f"--durable {tmp_path / name} cannot be used for durable handles: Not a directory; name a folder"
    assert run.stderr.startswith(f"ferrule serve: {problem} ")
    assert run.stderr.count("\n") == 1
    assert "importing torch" not in run.stderr


def test_a_pool_that_is_too_small_for_the_model_ends_with_2() -> None:
    """Before weights are read; the message names the flag and the least size."""
    run = _run("--kv-memory", "64KiB", "--device", "cpu", "--listen", "127.0.0.1:0")
    assert (run.returncode, run.stdout) == (2, "")
    assert "reading weights" not in run.stderr
    said = run.stderr.splitlines()[-1]
    assert said.startswith("ferrule serve: --kv-memory is 65536 bytes, too little for this model: it needs at least ")
    least = re.search(r"at least (\d+KiB) ", said)
    assert least is not None
    with _running("--kv-memory", least[1], "--device", "cpu", "--listen", "127.0.0.1:0") as (process, values):
        assert values["blocks"] == "7"
        _end(process)


def test_help_and_version() -> None:
    """On stdout, exit code 0, no torch needed."""
    assert "examples:" in _run("--help").stdout
    version = _run("--version")
    assert (version.returncode, version.stdout) == (0, f"ferrule {__version__}\n")


def test_without_the_server_extra_one_sentence_tells_what_to_install(tmp_path: Path) -> None:
    """A missing module is no traceback."""
    hidden = tmp_path / "torch"
    hidden.mkdir()
    (hidden / "__init__.py").write_text("raise ModuleNotFoundError('gone', name='torch')")
    run = subprocess.run(
        _command("--listen", "127.0.0.1:0", "--log-level", "error"),
        capture_output=True,
        text=True,
        timeout=60,
        env=_environment(PYTHONPATH=_before_all_else(tmp_path)),
        check=False,
    )
    assert run.returncode == 2
    assert run.stderr.startswith("ferrule serve: the module 'torch' is missing: install ferrule")
    assert run.stderr.count("\n") == 1
