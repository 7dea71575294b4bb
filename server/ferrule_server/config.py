"""Settings: command line over environment over defaults, validated once into a frozen :class:`ServerConfig`.

Nothing else reads the environment. Every flag ``--some-thing`` has a variable ``FERRULE_SOME_THING``. An empty variable
counts as unset, but for those of tokens and TLS, which are refused; ``~`` is expanded in every path.
"""

from __future__ import annotations

import ipaddress
import os
import re
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeVar
from urllib.parse import urlsplit

from ferrule_server.arguments import (
    DTYPES,
    EXECUTORS,
    LOG_FORMATS,
    LOG_LEVELS,
    UI_CHOICES,
    build_parser,
    flag_of,
    variable_of,
)
from ferrule_server.errors import ConfigError
from ferrule_server.quotas import QuotaLimits

DEMO_MODEL: Final = "demo"
DEFAULT_CONNECTIONS: Final = 1024
CONNECTIONS_OF_STRANGERS: Final = 12
DEFAULT_MASK_BYTES: Final = 64 << 20
"""What the registered token masks of one principal may take, unless something else is set."""
DEFAULT_KV_BYTES: Final = 1 << 30
"""Size of the KV pool in the memory of the host, unless something else is set."""
DEFAULT_QUOTAS: Final = QuotaLimits(mask_bytes=DEFAULT_MASK_BYTES)

DEFAULT_OTLP_PORT: Final = 4317
"""Of OTLP over gRPC."""

NEVER_EMPTY: Final = frozenset({"token_file", "tls_cert", "tls_key", "tls_client_ca"})
"""Settings that are refused if they are empty: a variable that expands to nothing must not open the server."""

_SIZE_UNITS: Final = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
_TIME_UNITS: Final = {"ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_MIN_TTL_S: Final = 5.0
_MAX_TTL_S: Final = 30 * 24 * 3600.0
_MAX_UNIX_PATH_BYTES: Final = 107
_DEVICE: Final = re.compile(r"auto|cpu|cuda(:(0|[1-9]\d{0,2}))?")
_INSTANCE: Final = re.compile(r"[A-Za-z0-9_-]{1,64}")
_REVISION: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]{0,199}")
_TRUE: Final = ("1", "true", "yes", "on")
_FALSE: Final = ("0", "false", "no", "off")

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class ListenAddress:
    """Where the server listens: a TCP host and port, or a unix socket path.

    Attributes:
        host: IP address or name; empty for a unix socket.
        port: 0 lets the system choose.
        path: Of the unix socket, or None.
    """

    host: str = ""
    port: int = 0
    path: Path | None = None

    @property
    def target(self) -> str:
        """The address as gRPC writes it, such as ``127.0.0.1:50051``, ``[::1]:50051`` or ``unix:/run/f.sock``."""
        if self.path is not None:
            return f"unix:{self.path}"
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def is_local(self) -> bool:
        """Whether only this machine can reach it."""
        if self.path is not None:
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """Everything that can be set, valid.

    Attributes:
        model: ``demo``, a model folder, or ``org/name`` on the hub; None for an executor without weights.
        revision: Branch, tag or commit of a model on the hub; None: its main branch.
        is_offline: Fetch nothing; a model of the hub must be in the cache.
        is_download_only: Fetch the model, if need be, and serve nothing.
        listen: Where to serve.
        executor: One of EXECUTORS.
        device: ``auto``, ``cpu``, ``cuda`` or ``cuda:N``.
        dtype: One of DTYPES.
        kv_memory_bytes: Size of the KV pool; None: on a GPU what ``gpu_memory_fraction`` leaves, else
            DEFAULT_KV_BYTES.
        gpu_memory_fraction: Share of a GPU's memory that may be used.
        is_deterministic: Logits must not depend on what else is in a step.
        has_cuda_runner: The kernels may run where there is a GPU.
        has_early_launch: A kernel may start while the one before it runs; off to find out what a fault comes from.
        kernel_cache: Folder of compiled kernels; None: in the user's cache folder.
        kernel_bundle: File of kernels that were compiled elsewhere, or None.
        max_context: Longest sequence in tokens; None: the model's own limit.
        max_ttl_s: Longest lease in seconds.
        max_step_rows: Most rows in one step.
        instance: Name of this server in its handles.
        metrics_listen: Where metrics and the web page are served over HTTP; None: nowhere.
        ui: One of UI_CHOICES: whether the web page is served there.
        log_level: One of LOG_LEVELS. log_format: one of LOG_FORMATS.
        otlp_endpoint: URL of the collector that traces are sent to, without a path; None: nothing is traced.
        is_insecure: Listening beyond this machine without authentication is accepted.
        has_reflection: Serve gRPC reflection.
        num_threads: Threads that compute; None: one per core, one in all for a small model.
        token_file: Bearer tokens that are accepted; None: nobody needs one.
        tls_cert, tls_key: PEM files of the server's certificate chain and key; None: plain text.
        tls_client_ca: PEM file of the authorities whose client certificates are accepted, one being required.
        admins: Principals with the role admin that a client certificate names.
        quotas: What each principal may use, unless the token file says otherwise for it.
        max_connections: Most connections; None: :attr:`connection_limit` decides.
        max_waiting_jobs: Most appends accepted and not finished, of all principals together.
        max_step_time_s: Longest step that prefill rows may make, in seconds; None: twice a decode step.
        drain_grace_s: How long live handles are served after SIGTERM.
        has_prefix_cache: Blocks of released sequences are found again by prompts that begin the same.
        logs_top_tokens: Log the best tokens of every output row: contents, for debugging alone.
        failpoints: For tests: where to break on purpose, see ``engine/failpoints.py``; empty in production.
    """

    model: str | None = DEMO_MODEL
    revision: str | None = None
    is_offline: bool = False
    is_download_only: bool = False
    listen: ListenAddress = ListenAddress("127.0.0.1", 50051)
    executor: str = "auto"
    device: str = "auto"
    dtype: str = "auto"
    kv_memory_bytes: int | None = None
    gpu_memory_fraction: float = 0.9
    is_deterministic: bool = False
    has_cuda_runner: bool = True
    has_early_launch: bool = True
    kernel_cache: Path | None = None
    kernel_bundle: Path | None = None
    max_context: int | None = None
    max_ttl_s: float = 3600.0
    max_step_rows: int = 512
    instance: str = "ferrule"
    metrics_listen: ListenAddress | None = None
    ui: str = "auto"
    log_level: str = "info"
    log_format: str = "text"
    otlp_endpoint: str | None = None
    is_insecure: bool = False
    has_reflection: bool = False
    num_threads: int | None = None
    token_file: Path | None = None
    tls_cert: Path | None = None
    tls_key: Path | None = None
    tls_client_ca: Path | None = None
    admins: tuple[str, ...] = ()
    quotas: QuotaLimits = DEFAULT_QUOTAS
    max_connections: int | None = None
    max_waiting_jobs: int = 4096
    max_step_time_s: float | None = None
    drain_grace_s: float = 25.0
    has_prefix_cache: bool = True
    logs_top_tokens: bool = False
    failpoints: str = ""

    @property
    def connection_limit(self) -> int:
        """Most connections: few where strangers can connect, since each of theirs can take 4 MiB (256 calls of 15 KB).

        Strangers are those who can reach a server with tokens over a network: a certificate is asked for earlier.
        """
        if self.max_connections is not None:
            return self.max_connections
        has_strangers = self.token_file is not None and self.tls_client_ca is None and not self.listen.is_local
        return CONNECTIONS_OF_STRANGERS if has_strangers else DEFAULT_CONNECTIONS

    def __post_init__(self) -> None:
        """Refuse what cannot work.

        Raises:
            ConfigError: A setting is out of its range, or two exclude each other.
        """
        _require(self.executor in EXECUTORS, f"--executor must be one of {', '.join(EXECUTORS)}, got {self.executor!r}")
        _require(self.dtype in DTYPES, f"--dtype must be one of {', '.join(DTYPES)}, got {self.dtype!r}")
        _require(self.log_level in LOG_LEVELS, f"--log-level must be one of {', '.join(LOG_LEVELS)}")
        _require(self.log_format in LOG_FORMATS, f"--log-format must be one of {', '.join(LOG_FORMATS)}")
        _require(
            self.kv_memory_bytes is None or self.kv_memory_bytes >= 1 << 16,
            f"--kv-memory must be at least 64KiB, got {self.kv_memory_bytes} bytes",
        )
        _require(self.max_context is None or self.max_context >= 1, "--max-context must be at least 1")
        _require(_MIN_TTL_S <= self.max_ttl_s <= _MAX_TTL_S, "--max-ttl must be from 5s to 720h")
        _require(2 <= self.max_step_rows <= 1 << 16, "--max-step-rows must be from 2 to 65536")
        _require(
            self.max_connections is None or 1 <= self.max_connections <= 1 << 16,
            "--max-connections must be from 1 to 65536",
        )
        _require(self.max_waiting_jobs >= 1, "--max-waiting-jobs must be at least 1")
        _require(self.drain_grace_s <= _MAX_TTL_S, "--drain-grace must be at most 720h")
        _require(self.num_threads is None or 1 <= self.num_threads <= 1024, "--threads must be from 1 to 1024")
        _require(
            _INSTANCE.fullmatch(self.instance) is not None,
            f"--instance must be 1 to 64 of A-Z a-z 0-9 _ -, got {self.instance!r}",
        )
        self._check_access()
        self._check_metrics()
        self._check_model()
        self._check_device()
        if self.executor == "paged-reference":
            _require(self.model is None, "--executor paged-reference has no weights; leave --model out")
            _require(
                self.dtype in ("auto", "float32"), "--executor paged-reference computes in float32; leave --dtype out"
            )

    def _check_model(self) -> None:
        """Refuse a revision that cannot be one, or of what has none."""
        if self.is_download_only:
            _require(
                self.model not in (None, DEMO_MODEL), "--download-only is for models on the hub: add --model org/name"
            )
        if self.revision is None:
            return
        _require(
            _REVISION.fullmatch(self.revision) is not None and ".." not in self.revision,
            f"--revision must be a branch, a tag or a commit, got {self.revision!r}",
        )
        _require(self.model not in (None, DEMO_MODEL), "--revision is of a model on the hub: add --model org/name")

    def _check_device(self) -> None:
        """Refuse settings of the device that contradict each other; whether it is there is seen at the start."""
        _require(
            _DEVICE.fullmatch(self.device) is not None,
            f"--device must be auto, cpu, cuda or cuda:N, got {self.device!r}",
        )
        _require(
            0.1 <= self.gpu_memory_fraction <= 1.0,
            f"--gpu-memory-fraction must be from 0.1 to 1, got {self.gpu_memory_fraction:g}",
        )
        if self.executor == "paged-reference":
            _require(
                self.device in ("auto", "cpu"),
                "--executor paged-reference computes on the processor; leave --device out",
            )
        if self.executor == "numba-cuda":
            _require(self.device != "cpu", "--executor numba-cuda runs on a GPU; leave --device cpu out")
            _require(self.dtype != "float32", "--executor numba-cuda computes in bfloat16; leave --dtype float32 out")
        if self.is_deterministic:
            self._check_deterministic()

    def _check_deterministic(self) -> None:
        """Refuse settings under which the kernels cannot run, whose bits alone are promised."""
        for holds, setting in (
            (self.executor in ("auto", "numba-cuda"), f"--executor {self.executor}"),
            (self.device != "cpu", "--device cpu"),
            (self.has_cuda_runner, "--disable-cuda-runner"),
        ):
            _require(holds, f"--deterministic needs the kernels of a GPU: no {setting}")
        _require(
            self.dtype != "float32",
            "--deterministic needs the kernels of a GPU, which compute in bfloat16: no --dtype float32",
        )

    def _check_access(self) -> None:
        """Refuse settings of access that contradict each other, or leave the server open to a network unasked."""
        _require((self.tls_cert is None) == (self.tls_key is None), "--tls-cert and --tls-key go together")
        _require(
            self.tls_client_ca is None or self.tls_cert is not None,
            "--tls-client-ca needs --tls-cert and --tls-key: client certificates come with TLS only",
        )
        if self.admins:
            _require(self.tls_client_ca is not None, "--admins names client certificates: add --tls-client-ca")
            _require(
                self.token_file is None,
                "--admins has no effect with --token-file, where tokens name principals: write admin on their lines",
            )
        _require(
            self.is_insecure or self.listen.is_local or self.has_authentication,
            f"--listen {self.listen.target} can be reached from other machines and there is no authentication; "
            "use 127.0.0.1, [::1] or unix:PATH, or --token-file or --tls-client-ca, or add --insecure if the network "
            "is trusted",
        )

    def _check_metrics(self) -> None:
        """Refuse a page that would be served nowhere, and metrics where no HTTP client finds them."""
        _require(self.ui in UI_CHOICES, f"--ui must be one of {', '.join(UI_CHOICES)}, got {self.ui!r}")
        _require(
            self.metrics_listen is None or self.metrics_listen.path is None,
            "--metrics-listen must be HOST:PORT, such as 127.0.0.1:9464: HTTP clients know no unix: paths",
        )
        _require(
            self.metrics_listen is None or not self.metrics_listen.port or self.metrics_listen != self.listen,
            f"--metrics-listen and --listen cannot share {self.listen.target}: choose another port",
        )
        _require(
            self.metrics_listen is not None or self.ui != "on",
            "--ui on needs an address to serve the page on: add --metrics-listen 127.0.0.1:9464",
        )

    @property
    def has_ui(self) -> bool:
        """Whether the web page is served: by itself only to those whom gRPC would let see as much."""
        if self.metrics_listen is None or self.ui != "auto":
            return self.ui == "on"
        is_open = self.listen.path is None and not self.has_authentication
        return self.metrics_listen.is_local and is_open

    @property
    def has_authentication(self) -> bool:
        """Whether a caller needs credentials."""
        return self.token_file is not None or self.tls_client_ca is not None


def parse_config(arguments: Sequence[str], environment: Mapping[str, str]) -> ServerConfig:
    """Return the settings: flags over environment variables over defaults.

    Args:
        arguments: Without the program's name.
        environment: Usually ``os.environ``; only ``FERRULE_*`` is looked at.

    Raises:
        ConfigError: A value is unusable; the message says which and what would do.
        SystemExit: ``--help``, ``--version`` or an unknown flag, as argparse does it.
    """
    flags = vars(build_parser().parse_args(arguments))

    def setting(name: str, read: Callable[[str], _T], default: _T) -> _T:
        origin, text = _given(name, flags[name], environment)
        if text is None:
            return default
        try:
            return read(text)
        except ValueError as error:
            raise ConfigError(f"{origin} {text!r}: {error}") from None

    executor = setting("executor", str, "auto")
    return ServerConfig(
        model=setting("model", _model, None if executor == "paged-reference" else DEMO_MODEL),
        revision=setting("revision", str, None),
        is_offline=setting("offline", _boolean, False),
        is_download_only=setting("download_only", _boolean, False),
        listen=setting("listen", parse_listen, ListenAddress("127.0.0.1", 50051)),
        executor=executor,
        device=setting("device", str, "auto"),
        dtype=setting("dtype", str, "auto"),
        kv_memory_bytes=setting("kv_memory", parse_size, None),
        gpu_memory_fraction=setting("gpu_memory_fraction", _number, 0.9),
        is_deterministic=setting("deterministic", _boolean, False),
        has_cuda_runner=not setting("disable_cuda_runner", _boolean, False),
        has_early_launch=not setting("disable_early_launch", _boolean, False),
        kernel_cache=setting("kernel_cache", _path, None),
        kernel_bundle=setting("kernel_bundle", _path, None),
        max_context=setting("max_context", _count, None),
        max_ttl_s=setting("max_ttl", parse_duration, 3600.0),
        max_step_rows=setting("max_step_rows", _count, 512),
        instance=setting("instance", str, instance_of_host(socket.gethostname())),
        metrics_listen=setting("metrics_listen", _metrics_address, None),
        ui=setting("ui", str, "auto"),
        log_level=setting("log_level", str, "info"),
        log_format=setting("log_format", str, "text"),
        otlp_endpoint=setting("otlp_endpoint", parse_otlp_endpoint, None),
        is_insecure=setting("insecure", _boolean, False),
        has_reflection=setting("reflection", _boolean, False),
        num_threads=setting("threads", _count, None),
        token_file=setting("token_file", _path, None),
        tls_cert=setting("tls_cert", _path, None),
        tls_key=setting("tls_key", _path, None),
        tls_client_ca=setting("tls_client_ca", _path, None),
        admins=setting("admins", _names, ()),
        quotas=QuotaLimits(
            handles=setting("quota_handles", _positive, None),
            kv_tokens=setting("quota_kv_tokens", _positive, None),
            queued_rows=setting("quota_queued_rows", _positive, None),
            prefill_tokens_per_s=setting("quota_prefill_rate", _positive, None),
            retained_bytes=setting("quota_retained", parse_size, None),
            mask_bytes=setting("quota_mask_bytes", _size_or_none, DEFAULT_QUOTAS.mask_bytes),
            calls_per_s=setting("quota_call_rate", _positive, None),
            request_bytes_per_s=setting("quota_request_bytes", _positive_size, None),
            text_bytes_per_s=setting("quota_text_rate", _positive_size, None),
        ),
        max_connections=setting("max_connections", _count, None),
        max_waiting_jobs=setting("max_waiting_jobs", _count, 4096),
        max_step_time_s=setting("max_step_time", parse_duration, None),
        drain_grace_s=setting("drain_grace", parse_duration, 25.0),
        has_prefix_cache=setting("prefix_cache", _on_or_off, True),
        logs_top_tokens=setting("debug_top_tokens", _boolean, False),
        failpoints=setting("failpoints", str, ""),
    )


def _given(name: str, flag: str | None, environment: Mapping[str, str]) -> tuple[str, str | None]:
    """Return the name that a setting was given by and its text, which is None if the setting was not given.

    An empty variable counts as unset, except where an unset one would leave the server without tokens or TLS.

    Raises:
        ConfigError: A setting that decides who may connect is empty.
    """
    origin, text = flag_of(name), flag
    if text is None:
        origin, text = variable_of(name), environment.get(variable_of(name))
        if name not in NEVER_EMPTY:
            return origin, text if text and text.strip() else None
    if name in NEVER_EMPTY and text is not None and not text.strip():
        raise ConfigError(f"{origin} is empty: give the path of a file, or leave it out")
    return origin, text


def parse_listen(text: str) -> ListenAddress:
    """Return the address that ``HOST:PORT`` or ``unix:PATH`` names.

    Raises:
        ValueError: It is neither.
    """
    if text.startswith("unix:"):
        path = text.removeprefix("unix:")
        if path.startswith("//"):
            path = path[2:]
        if not path or path.endswith("/"):
            raise ValueError("unix: needs the path of a socket, such as unix:/tmp/ferrule.sock")
        path = str(_path(path))
        if len(os.fsencode(path)) > _MAX_UNIX_PATH_BYTES:
            raise ValueError(f"a unix socket path holds at most {_MAX_UNIX_PATH_BYTES} bytes")
        return ListenAddress(path=Path(path))
    host, colon, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not colon or not host or not (port.isascii() and port.isdigit()) or int(port) > 65535:
        raise ValueError("must be HOST:PORT, such as 127.0.0.1:50051 or [::1]:50051, or unix:PATH")
    # One name, several addresses: gRPC would be content with whichever of them is free.
    return ListenAddress("127.0.0.1" if host == "localhost" else host, int(port))


def _metrics_address(text: str) -> ListenAddress:
    try:
        return parse_listen(text)
    except ValueError:
        raise ValueError("must be HOST:PORT, such as 127.0.0.1:9464 or [::1]:9464") from None


def parse_otlp_endpoint(text: str) -> str:
    """Return the URL of a collector, with its port.

    Raises:
        ValueError: It is none that OTLP over gRPC can be sent to.
        ConfigError: It holds a password, which the message does not repeat.
    """
    advice = "must be http://HOST:PORT, or https:// for TLS, such as http://127.0.0.1:4317"
    try:
        url = urlsplit(text)
        port = url.port or DEFAULT_OTLP_PORT
    except ValueError:
        raise ValueError(advice) from None
    if url.scheme not in ("http", "https") or not url.hostname:
        raise ValueError(advice)
    if url.path not in ("", "/") or url.query or url.fragment:
        raise ValueError(f"{advice}; OTLP over gRPC has no path, and OTLP over HTTP is not spoken here")
    if url.username is not None:
        raise ConfigError("--otlp-endpoint holds credentials: they belong into OTEL_EXPORTER_OTLP_HEADERS")
    host = f"[{url.hostname}]" if ":" in url.hostname else url.hostname
    return f"{url.scheme}://{host}:{port}"


def parse_size(text: str) -> int:
    """Return the bytes of a size such as ``512MiB``.

    Raises:
        ValueError: The unit is missing or unknown.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]iB)", text.strip())
    if match is None:
        raise ValueError("must be a number with KiB, MiB, GiB or TiB, such as 512MiB; 1G is written 1GiB")
    return int(float(match[1]) * _SIZE_UNITS[match[2]])


def parse_duration(text: str) -> float:
    """Return the seconds of a time such as ``20ms``, ``90s``, ``30m`` or ``1h``.

    Raises:
        ValueError: The unit is missing or unknown.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(ms|[smh])", text.strip())
    if match is None:
        raise ValueError("must be a number with ms, s, m or h, such as 30m")
    return float(match[1]) * _TIME_UNITS[match[2]]


def instance_of_host(host_name: str) -> str:
    """Return an instance name made of a host name: its first label, anything unusual replaced."""
    label = re.sub(r"[^A-Za-z0-9_-]", "-", host_name.split(".", maxsplit=1)[0]).strip("-")
    return label[:64] or "ferrule"


def _count(text: str) -> int:
    if not (text.isascii() and text.isdigit()):
        raise ValueError("must be a whole number")
    return int(text)


def _number(text: str) -> float:
    if not re.fullmatch(r"\d*\.?\d+|\d+\.", text.strip()):
        raise ValueError("must be a number such as 0.9")
    return float(text)


def _path(text: str) -> Path:
    if not text:
        raise ValueError("must be a path")
    try:
        return Path(text).expanduser()
    except RuntimeError:
        raise ValueError("the home directory of this user is not known") from None


def _model(text: str) -> str:
    if not text:
        raise ValueError("must be demo, a folder, or org/name on the hub")
    return str(_path(text)) if text.startswith("~") else text


def _size_or_none(text: str) -> int | None:
    return None if text.strip().lower() == "none" else parse_size(text)


def _positive(text: str) -> int:
    if (count := _count(text)) == 0:
        raise ValueError("must be at least 1")
    return count


def _positive_size(text: str) -> int:
    if (size := parse_size(text)) == 0:
        raise ValueError("must be at least one byte")
    return size


def _names(text: str) -> tuple[str, ...]:
    return tuple(name for name in (part.strip() for part in text.split(",")) if name)


def _boolean(text: str) -> bool:
    if text.lower() in _TRUE:
        return True
    if text.lower() in _FALSE:
        return False
    raise ValueError("must be 1 or 0")


def _on_or_off(text: str) -> bool:
    if text.lower() not in ("on", "off"):
        raise ValueError("must be on or off")
    return text.lower() == "on"


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise ConfigError(message)
