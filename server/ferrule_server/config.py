"""The settings of the server: :class:`ServerConfig`, in which each is declared once.

Nothing else reads the environment. A value is checked when it is read; checks that span several settings are made here.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from ferrule_server.addresses import ListenAddress, parse_listen, parse_metrics_listen, parse_otlp_endpoint
from ferrule_server.errors import ConfigError
from ferrule_server.named_models import DEMO_MODEL, NAMED_MODELS
from ferrule_server.quotas import DEFAULT_QUOTAS, MIN_TTL_S, QuotaLimits
from ferrule_server.settings import (
    COUNT,
    CREDENTIALS,
    FILE,
    FOLDER,
    NAMES,
    ON_OR_OFF,
    POSITIVE,
    SHARE,
    SIZE,
    TEXT,
    TIME,
    Group,
    Kind,
    matching,
    one_of,
    parse_path,
)

INT8_INPUTS: Final = "--activations int8 goes with --weights int8, or Q8_0, Q6_K, Q5 or Q3_K in a GGUF file, only"
DEFAULT_CONNECTIONS: Final = 1024
CONNECTIONS_OF_STRANGERS: Final = 12
DEFAULT_KV_MEMORY: Final = "1GiB"
DEFAULT_KV_BYTES: Final = SIZE.read(DEFAULT_KV_MEMORY)
"""Size of the KV pool in the memory of the host, unless something else is set."""

_MAX_TTL: Final = "720h"
_DEVICE: Final = matching("auto|cpu|cuda|cuda:N", r"auto|cpu|cuda(:(0|[1-9]\d{0,2}))?", "auto, cpu, cuda or cuda:N")
_REVISION: Final = matching("NAME", r"(?!.*\.\.)[A-Za-z0-9][A-Za-z0-9._/-]{0,199}", "a branch, a tag or a commit")
_INSTANCE: Final = matching("NAME", r"[A-Za-z0-9_-]{1,64}", "1 to 64 of A-Z a-z 0-9 _ -")

_MODEL: Final = Group("model")
_GPU: Final = Group("on a GPU")
_LIMITS: Final = Group("memory and limits")
_NETWORK: Final = Group("network")
_ACCESS: Final = Group("authentication")
_DURABLE: Final = Group("durable handles")
_LOGS: Final = Group("logs and traces")


def instance_of_host(host_name: str) -> str:
    """Return an instance name: the first label of the host name, with unusual characters replaced by dashes."""
    label = re.sub(r"[^A-Za-z0-9_-]", "-", host_name.split(".", maxsplit=1)[0]).strip("-")
    return label[:64] or "ferrule"


def _model(text: str) -> str:
    if not text:
        raise ValueError(f"must be {', '.join(NAMED_MODELS)}, a folder, a GGUF file, or org/name on the hub")
    return str(parse_path(text)) if text.startswith("~") else text


_MODEL_KIND: Final = Kind("|".join([*NAMED_MODELS, "FOLDER", "FILE.gguf", "ORG/NAME"]), _model)


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """All settings of a server. They fit together: construction refuses combinations that cannot work.

    ``--help`` shows the docstrings of the fields, each with its default. ``model`` is None for an executor without
    weights.
    """

    model: str | None = _MODEL.setting("--model", _MODEL_KIND, DEMO_MODEL)
    """demo, the small bundled model; smollm2, SmolLM2-135M-Instruct, which is installed apart (without it the start
    says how); a Hugging Face folder with safetensors; a GGUF file (the first, if it has parts); a model on the Hugging
    Face hub, whose configuration, tokenizer and safetensors are fetched once and kept in HF_HOME; or one GGUF file of
    such a repository, ORG/NAME:Q4_K_M or ORG/NAME/FILE.gguf
    """
    ignored_config_keys: tuple[str, ...] = _MODEL.setting("--ignore-config-key", NAMES, "")
    """keys of the model's config.json, or of its GGUF file, that count as absent, at your word that the model computes
    the same without them; can be repeated; each is logged as a warning
    """
    revision: str | None = _MODEL.optional("--revision", _REVISION, "main")
    """branch, tag or commit of a model on the hub"""
    is_offline: bool = _MODEL.switch("--offline")
    """fetch nothing: a model on the hub must already be in the cache; HF_HUB_OFFLINE=1 does the same"""
    is_download_only: bool = _MODEL.switch("--download-only")
    """fetch a model from the hub, print its folder and exit, to prepare servers that have no network"""
    executor: str = _MODEL.setting(
        "--executor", one_of("auto", "torch", "numba-cpu", "numba-cuda", "paged-reference"), "auto"
    )
    """what runs the steps: numba-cpu runs our own kernels on the processor, with the same bits whatever shares a step;
    numba-cuda runs our own kernels on a GPU, which must exist, and falls back to torch on it; torch runs on any device;
    paged-reference needs no model and starts at once, for client authors and tests (default: {default} = numba-cuda on
    a GPU, else numba-cpu; if the kernels do not support the model or the machine, another one runs and the log says
    why)
    """
    reference_vocab_size: int = _MODEL.setting("--reference-vocab", COUNT.within("2", "1048576"), "256")
    """tokens of paged-reference's vocabulary"""
    reference_layers: int = _MODEL.setting("--reference-layers", COUNT.within("1", "256"), "2")
    """layers of paged-reference, all of which keep KV"""
    reference_heads: int = _MODEL.setting("--reference-heads", COUNT.within("1", "256"), "4")
    """heads of each layer of paged-reference"""
    reference_block_size: int = _MODEL.setting(
        "--reference-block-size", one_of("1", "2", "4", "8", "16", "32", "64").then(int), "16"
    )
    """tokens in a block of paged-reference"""
    device: str = _MODEL.setting("--device", _DEVICE, "auto")
    """where the model runs; a GPU that is named must exist (default: {default} = the first GPU, else the processor)"""
    dtype: str = _MODEL.setting("--dtype", one_of("auto", "bfloat16", "float16", "float32"), "auto")
    """data type of weights, activations and KV; float16 runs in torch only (default: {default} = bfloat16 on a GPU,
    with numba-cpu, and on processors with instructions for it, else float32)
    """
    weights: str = _MODEL.setting("--weights", one_of("float", "int8", "int4"), "float")
    """how numba-cpu keeps the matrices of the model: as --dtype says, or quantised when they are read, to int8 with a
    scale per row or to int4 with a scale per 32 weights; decoding is then up to twice or three times as fast, and the
    model takes half or a third of the memory
    """
    activations: str = _MODEL.setting("--activations", one_of("int16", "int8"), "int16")
    """how what is multiplied with quantised weights is rounded: int16 is finer than bfloat16; int8, for --weights int8
    and the matrices of a GGUF file in Q8_0, Q6_K, Q5 or Q3_K, on processors with AVX512-VNNI, is faster with many
    sequences and for prompts, and costs accuracy
    """
    num_threads: int | None = _MODEL.optional(
        "--threads",
        COUNT.within("1", "256"),
        "one per physical core that affinity and CPU quota allow; torch uses one in all below 128 MiB of weights",
    )
    """threads that compute"""
    is_deterministic: bool = _MODEL.switch("--deterministic")
    """refuse to start unless the same tokens give the same bits, whatever shares a step; numba-cpu always does that, on
    a GPU it is slower
    """
    kernel_cache: Path | None = _MODEL.optional("--kernel-cache", FOLDER, "~/.cache/ferrule")
    """where the compiled kernels of numba-cpu, and what a test of early launch found, are kept for the next start"""
    gpu_memory_fraction: float = _GPU.setting("--gpu-memory-fraction", SHARE.within("0.1", "1"), "0.9")
    """share of the GPU's memory that the server may use, from 0.1 to 1"""
    has_cuda_runner: bool = _GPU.switch("--disable-cuda-runner", default=True)
    """run everything in torch, even on a GPU with --executor numba-cuda, to see whether a fault is in the kernels"""
    has_cuda_graphs: bool = _GPU.switch("--disable-cuda-graphs", default=True)
    """launch the kernels of each step one by one; slower, to see whether a fault comes from CUDA graphs"""
    early_launch: str = _GPU.setting("--early-launch", one_of("auto", "on", "off"), "auto")
    """let a kernel start while the previous one runs: auto if a test of this kind of GPU has passed, which the first
    start runs; off, which is slower, shows whether a fault comes from overlapping kernels
    """
    kernel_bundle: Path | None = _GPU.optional("--kernel-bundle", FILE, "the package ferrule-kernels, if installed")
    """bundle of compiled kernels, or a folder of them; torch runs every step if it lacks a kernel of the model; a file
    that is not a bundle is an error on any machine
    """
    kv_memory_bytes: int | None = _LIMITS.optional(
        "--kv-memory",
        SIZE.within("64KiB"),
        f"{DEFAULT_KV_MEMORY}, less if less is free; on a GPU what --gpu-memory-fraction leaves beside the model",
    )
    """memory of the KV cache of all sequences together, in KiB, MiB, GiB or TiB, such as 512MiB; it is allocated at the
    start and never grows; weights and everything else come on top
    """
    max_context: int | None = _LIMITS.optional("--max-context", POSITIVE, "the model's limit")
    """longest sequence in tokens"""
    max_ttl_s: float = _LIMITS.setting("--max-ttl", TIME.within(f"{MIN_TTL_S:g}s", _MAX_TTL), "1h")
    """longest lease that a client can request, such as 90s, 30m or 1h"""
    max_step_rows: int = _LIMITS.setting("--max-step-rows", COUNT.within("2", "65536"), "512")
    """most tokens in one step, and in one UnifiedDecode; longer prompts are run in chunks"""
    max_step_time_s: float | None = _LIMITS.optional("--max-step-time", TIME, "twice a decode step")
    """longest step that prompts may cause while other sequences decode, such as 20ms; a batch that a client scheduled
    (UnifiedDecode) may cause a longer one, of 25ms while other principals decode, else of up to --max-step-rows"""
    max_connections: int | None = _LIMITS.optional(
        "--max-connections",
        COUNT.within("1", "65536"),
        f"{CONNECTIONS_OF_STRANGERS} with a token file on an address that others can reach, else {DEFAULT_CONNECTIONS}",
    )
    """most connections, further ones are closed; each can use about 4 MiB before it has authenticated"""
    max_waiting_jobs: int = _LIMITS.setting("--max-waiting-jobs", POSITIVE, "4096")
    """most requests that wait or run, of all principals together; more are refused with QUEUE_FULL"""
    has_prefix_cache: bool = _LIMITS.setting("--prefix-cache", ON_OR_OFF, "on")
    """keep the blocks of released sequences, until their space is needed, for prompts of the same principal that begin
    with the same tokens; replies say how many tokens were found
    """
    quotas: QuotaLimits = DEFAULT_QUOTAS
    listen: ListenAddress = _NETWORK.setting("--listen", Kind("HOST:PORT|unix:PATH", parse_listen), "127.0.0.1:50051")
    """address of the gRPC server; with port 0 the system chooses a port, which the line 'ready' names"""
    is_insecure: bool = _NETWORK.switch("--insecure")
    """accept an address that other machines can reach without authentication; anyone who reaches it can use the server
    """
    metrics_listen: ListenAddress | None = _NETWORK.optional(
        "--metrics-listen", Kind("HOST:PORT", parse_metrics_listen), "none"
    )
    """serve /metrics for Prometheus over HTTP, in plain text and without authentication; with port 0 the system chooses
    a port, which the line 'ready' names
    """
    ui: str = _NETWORK.setting("--ui", one_of("auto", "on", "off"), "auto")
    """serve the web page /ui next to the metrics: blocks, the fork tree and latencies, never tokens (default: {default}
    = if only this machine can reach --metrics-listen, and gRPC there requires no credentials)
    """
    has_reflection: bool = _NETWORK.switch("--reflection")
    """serve gRPC reflection, for buf curl"""
    instance: str = _NETWORK.setting("--instance", _INSTANCE, "ferrule")
    """name of this server in its handles, used for routing (default: the host name)"""
    drain_grace_s: float = _NETWORK.setting("--drain-grace", TIME.within("0s", _MAX_TTL), "25s")
    """how long live handles are served after SIGTERM"""
    token_file: Path | None = _ACCESS.optional("--token-file", CREDENTIALS)
    """accepted bearer tokens: SHA-256 hashes, one per line, as 'ferrule token NAME' prints them; every call then
    requires a token; read again when the file changes
    """
    tls_cert: Path | None = _ACCESS.optional("--tls-cert", CREDENTIALS)
    """PEM certificate chain of the server; read again when the file changes"""
    tls_key: Path | None = _ACCESS.optional("--tls-key", CREDENTIALS)
    """PEM private key of --tls-cert, without a password"""
    tls_client_ca: Path | None = _ACCESS.optional("--tls-client-ca", CREDENTIALS)
    """PEM certificates of authorities: clients must present a certificate that one of them has signed; without
    --token-file, its URI SAN or common name is the principal
    """
    admins: tuple[str, ...] = _ACCESS.setting("--admins", NAMES, "")
    """principals of client certificates that have the role admin"""
    durable: Path | None = _DURABLE.optional("--durable", FOLDER, "none")
    """keep a journal in this directory, so that handles stay valid when the server ends and is started again: each step
    waits for its records to be on the disk before it is answered; only one server can use a directory
    """
    restore_wait: int = _DURABLE.setting("--restore-wait", COUNT.within("0", "16777216"), "8192")
    """tokens that a call on a sequence from before the restart waits for while they are computed again; a call that
    needs more is answered with RESTORING meanwhile, and clients repeat it
    """
    failpoints: str = Group("").setting("--failpoints", TEXT, "")
    """where to fail on purpose, for tests: see engine/faults/failpoints.py"""
    log_level: str = _LOGS.setting("--log-level", one_of("debug", "info", "warning", "error"), "info")
    """level of the log on stderr"""
    log_format: str = _LOGS.setting("--log-format", one_of("text", "json"), "text")
    """format of the log on stderr: lines of text, or one JSON object per line"""
    otlp_endpoint: str | None = _LOGS.optional("--otlp-endpoint", Kind("URL", parse_otlp_endpoint), "none")
    """send a trace of every call to this OpenTelemetry collector by OTLP over gRPC, such as http://127.0.0.1:4317; the
    standard OTEL_* variables set everything else; requires ferrule-server[otel]
    """
    logs_top_tokens: bool = _LOGS.switch("--debug-top-tokens")
    """log the handle id, the position and the five best tokens of every output row: the log then shows generated text,
    and every step is slower
    """

    @property
    def connection_limit(self) -> int:
        """Most connections: few if strangers can connect, since each connection can take 4 MiB (256 calls of 15 KB).

        Strangers can reach a server with tokens over a network. Client certificates are checked in the handshake.
        """
        if self.max_connections is not None:
            return self.max_connections
        has_strangers = self.token_file is not None and self.tls_client_ca is None and not self.listen.is_local
        return CONNECTIONS_OF_STRANGERS if has_strangers else DEFAULT_CONNECTIONS

    def __post_init__(self) -> None:
        """Refuse settings that do not fit together.

        Raises:
            ConfigError: Two settings exclude each other, or one needs another.
        """
        self._check_access()
        self._check_metrics()
        if self.model in (None, *NAMED_MODELS):
            _require(not self.is_download_only, "--download-only requires a model on the hub: add --model org/name")
            _require(self.revision is None, "--revision requires a model on the hub: add --model org/name")
        if self.is_deterministic:
            self._check_deterministic()
        if self.executor == "numba-cpu":
            _require(self.device in ("auto", "cpu"), "--executor numba-cpu runs on the processor; leave --device out")
        if self.executor == "numba-cuda":
            _require(self.device != "cpu", "--executor numba-cuda runs on a GPU; leave --device cpu out")
            _require(self.dtype != "float32", "--executor numba-cuda computes in bfloat16; leave --dtype float32 out")
        _require(self.activations == "int16" or self.weights != "int4", INT8_INPUTS)
        if needs := self.needs_kernels:
            is_processor = self.executor in ("auto", "numba-cpu") and not self.device.startswith("cuda")
            _require(is_processor, f"{needs} needs the kernels of the processor: --executor numba-cpu")
        if self.executor == "paged-reference":
            self._check_reference()
        if self.dtype == "float16":
            self._check_float16()

    def _check_reference(self) -> None:
        """Refuse settings that the executor without weights ignores."""
        runs = "--executor paged-reference"
        _require(self.model is None, f"{runs} has no weights; leave --model out")
        _require(self.device in ("auto", "cpu"), f"{runs} computes on the processor; leave --device out")
        _require(self.dtype in ("auto", "float32"), f"{runs} computes in float32; leave --dtype out")

    def _check_float16(self) -> None:
        """Refuse settings that need kernels, because only torch computes in float16."""
        runs = "--dtype float16 runs in torch only; leave"
        _require(self.executor in ("auto", "torch"), f"{runs} --executor {self.executor} out")
        _require(not self.needs_kernels, f"{runs} {self.needs_kernels} out")
        _require(not self.is_deterministic, f"{runs} --deterministic out")

    def _check_deterministic(self) -> None:
        """Refuse settings under which the kernels cannot run, because only they are deterministic."""
        needs = "--deterministic needs kernels, not torch: no"
        _require(self.executor in ("auto", "numba-cpu", "numba-cuda"), f"{needs} --executor {self.executor}")
        _require(self.has_cuda_runner, f"{needs} --disable-cuda-runner")

    def _check_access(self) -> None:
        """Refuse contradictory settings of access, and a server that is open to a network without --insecure."""
        _require((self.tls_cert is None) == (self.tls_key is None), "--tls-cert and --tls-key go together")
        _require(
            self.tls_client_ca is None or self.tls_cert is not None,
            "--tls-client-ca needs --tls-cert and --tls-key: client certificates come with TLS only",
        )
        if self.admins:
            _require(self.tls_client_ca is not None, "--admins names client certificates: add --tls-client-ca")
            _require("-" not in self.admins, "--admins must not name -: it stands for callers without credentials")
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
        """Refuse a web page without an address, and two listeners on one port."""
        _require(
            self.metrics_listen is None or not self.metrics_listen.port or self.metrics_listen != self.listen,
            f"--metrics-listen and --listen cannot share {self.listen.target}: choose another port",
        )
        _require(
            self.metrics_listen is not None or self.ui != "on",
            "--ui on needs an address to serve the page on: add --metrics-listen 127.0.0.1:9464",
        )

    @property
    def needs_kernels(self) -> str:
        """The setting that only the kernels of the processor can follow; empty: there is none."""
        weights = f"--weights {self.weights}" if self.weights != "float" else ""
        return weights or ("--activations int8" if self.activations == "int8" else "")

    @property
    def has_ui(self) -> bool:
        """Whether the web page is served; automatically only if gRPC shows the same clients as much."""
        if self.metrics_listen is None or self.ui != "auto":
            return self.ui == "on"
        is_open = self.listen.path is None and not self.has_authentication
        return self.metrics_listen.is_local and is_open

    @property
    def has_authentication(self) -> bool:
        """Whether a caller needs credentials."""
        return self.token_file is not None or self.tls_client_ca is not None


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise ConfigError(message)
