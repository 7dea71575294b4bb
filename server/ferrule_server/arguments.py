"""The command line of the server: its flags, and the text that ``--help`` teaches them with."""

from __future__ import annotations

import argparse
import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, NoReturn

from ferrule_server import __version__

EXECUTORS: Final = ("auto", "torch", "numba-cuda", "paged-reference")
DTYPES: Final = ("auto", "bfloat16", "float32")
LOG_LEVELS: Final = ("debug", "info", "warning", "error")
LOG_FORMATS: Final = ("text", "json")
UI_CHOICES: Final = ("auto", "on", "off")

_PREFIX: Final = "FERRULE_"

CLIENT_VARIABLES: Final = frozenset(
    f"{_PREFIX}{name}"
    for name in ("TARGET", "TIMEOUT", "TOKEN", "TLS", "TLS_CA", "CLIENT_CERT", "CLIENT_KEY", "TLS_SERVER_NAME")
)
"""What the commands of the client read from the environment."""

_OF_KUBERNETES: Final = re.compile(r"FERRULE_(?:\w+_)?(?:SERVICE_(?:HOST|PORT\w*)|PORT(?:_\d+_\w+)?)")
"""Put there by Kubernetes for services whose name begins with ``ferrule``."""


def flag_of(name: str) -> str:
    """Return the flag of a setting: ``--kv-memory`` of ``kv_memory``."""
    return f"--{name.replace('_', '-')}"


def variable_of(name: str) -> str:
    """Return the environment variable of a setting: ``FERRULE_KV_MEMORY`` of ``kv_memory``."""
    return f"{_PREFIX}{name.upper()}"


def unknown_variables(environment: Iterable[str]) -> list[str]:
    """Return the names ``FERRULE_*`` that nobody reads, each with what was probably meant.

    Args:
        environment: Names of variables.
    """
    known = CLIENT_VARIABLES | {variable_of(name) for name in vars(build_parser().parse_args([]))}
    ours = [name for name in environment if name.startswith(_PREFIX) and not _OF_KUBERNETES.fullmatch(name)]
    rests = sorted(name.removeprefix(_PREFIX) for name in known)  # the prefix would make all of them alike
    return [f"{name}{_meant(name.removeprefix(_PREFIX), rests, _PREFIX)}" for name in sorted(ours) if name not in known]


def _meant(given: str, known: Iterable[str], prefix: str = "") -> str:
    near = difflib.get_close_matches(given, list(known), 1)
    return f" (did you mean {prefix}{near[0]}?)" if near else ""


class _Parser(argparse.ArgumentParser):
    """Ends with one line on standard error and exit code 2 where it is used wrongly."""

    def error(self, message: str) -> NoReturn:
        """Write the line and end."""
        unknown = re.match(r"unrecognized arguments: ([^\s=]+)", message)
        if unknown is not None:
            message = f"unknown flag {unknown[1]}{_meant(unknown[1], self._option_string_actions)}"
        self.exit(2, f'{self.prog}: {message}; see "{self.prog} --help"\n')


def as_given(message: str, arguments: Sequence[str], environment: Mapping[str, str]) -> str:
    """Return a message in which each setting that came from the environment bears the name of its variable.

    Args:
        message: That names settings by their flags.
        arguments: Those that were parsed without a complaint.
        environment: Usually ``os.environ``.
    """
    for name, given in vars(build_parser().parse_args(arguments)).items():
        value = environment.get(variable_of(name))
        if given is None and value:
            with_value = rf"(?:[ =](?P<value>{re.escape(value)})(?![\w.]))?"
            pattern = re.compile(rf"{flag_of(name)}(?![\w-]){with_value}")
            message = pattern.sub(lambda found, name=name: _by_variable(name, found), message)  # type: ignore[misc]
    return message


def _by_variable(name: str, found: re.Match[str]) -> str:
    value = found["value"]
    return variable_of(name) + (f"={value}" if value else "")


def build_parser() -> argparse.ArgumentParser:
    """Return the parser; every value stays text or None, so that the environment can step in."""
    parser = _Parser(
        prog="ferrule serve",
        description="Serves a decoder-only language model over gRPC; clients hold handles to its KV cache.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"ferrule {__version__}")
    _add_model(parser)
    gpu = parser.add_argument_group("on a GPU")
    gpu.add_argument(
        "--gpu-memory-fraction",
        metavar="SHARE",
        help="share of the GPU's memory that the server may use, from 0.1 to 1 (default: 0.9)",
    )
    gpu.add_argument(
        "--deterministic",
        action="store_const",
        const="1",
        help="logits do not depend on what else is in a step: the same bits for one build, kind of GPU and executor;"
        " slower, and without the kernels there is no such server",
    )
    gpu.add_argument(
        "--disable-cuda-runner",
        action="store_const",
        const="1",
        help="run everything in torch, on the GPU too, with --executor numba-cuda too: to see whether a fault is the"
        " kernels'",
    )
    gpu.add_argument(
        "--disable-early-launch",
        action="store_const",
        const="1",
        help="start no kernel before the one in front of it has ended; slower, to see whether a fault comes from that",
    )
    gpu.add_argument(
        "--kernel-cache",
        metavar="FOLDER",
        help="where compiled kernels are kept for the next start (default: ~/.cache/ferrule/cubins)",
    )
    gpu.add_argument(
        "--kernel-bundle",
        metavar="FILE",
        help="kernels that were compiled elsewhere; what it lacks is compiled here, and a file that is no bundle ends"
        " the start, on any machine (default: none)",
    )
    memory = parser.add_argument_group("memory and limits")
    memory.add_argument(
        "--kv-memory",
        metavar="SIZE",
        help="size of the KV pool, allocated at start, in KiB, MiB, GiB or TiB: 512MiB (default: 1GiB; on a GPU what"
        " --gpu-memory-fraction leaves beside the model)",
    )
    memory.add_argument("--max-context", metavar="N", help="longest sequence in tokens (default: the model's limit)")
    memory.add_argument(
        "--max-ttl", metavar="TIME", help="longest lease a client can ask for: 90s, 30m, 1h (default: 1h)"
    )
    memory.add_argument(
        "--max-step-rows", metavar="N", help="most tokens in one step; longer prompts run in chunks (default: 512)"
    )
    memory.add_argument(
        "--max-step-time",
        metavar="TIME",
        help="longest step that prompts may make while others decode, such as 20ms (default: twice a decode step)",
    )
    memory.add_argument(
        "--max-connections",
        metavar="N",
        help="most connections; each can take about 4 MiB before it has shown credentials (default: 12 with a token"
        " file on an address that others can reach, else 1024)",
    )
    memory.add_argument(
        "--max-waiting-jobs", metavar="N", help="most requests waiting or running; beyond it QUEUE_FULL (default: 4096)"
    )
    memory.add_argument(
        "--prefix-cache",
        metavar="on|off",
        help="keep the blocks of released sequences, as long as nobody needs them, for prompts of the same principal"
        " that begin the same; replies say how many tokens were found (default: on)",
    )
    quotas = parser.add_argument_group("quotas of each principal (default: none but for masks)")
    quotas.add_argument("--quota-handles", metavar="N", help="live sequences")
    quotas.add_argument("--quota-kv-tokens", metavar="N", help="tokens in the KV pool, shared blocks counted once")
    quotas.add_argument("--quota-queued-rows", metavar="N", help="tokens waiting to be run")
    quotas.add_argument("--quota-prefill-rate", metavar="N", help="prompt tokens per second")
    quotas.add_argument("--quota-retained", metavar="SIZE", help="outputs kept for replay: 16MiB")
    quotas.add_argument(
        "--quota-mask-bytes",
        metavar="SIZE|none",
        help="registered token masks, a bit for each token of the vocabulary and 1 KiB each; the least recently used"
        " are dropped (default: 64MiB; 256MiB for all together)",
    )
    quotas.add_argument("--quota-call-rate", metavar="N", help="calls per second")
    quotas.add_argument("--quota-request-bytes", metavar="SIZE", help="bytes of requests per second: 16MiB")
    quotas.add_argument(
        "--quota-text-rate",
        metavar="SIZE",
        help="bytes of text per second that are turned into tokens or rendered, a token turned into text counted as"
        " four: 1MiB",
    )
    network = parser.add_argument_group("network")
    network.add_argument(
        "--listen",
        metavar="HOST:PORT|unix:PATH",
        help="port 0 lets the system choose, the line 'ready' tells which (default: 127.0.0.1:50051)",
    )
    network.add_argument(
        "--insecure",
        action="store_const",
        const="1",
        help="accept an address that other machines can reach without authentication; whoever reaches it may use it",
    )
    network.add_argument(
        "--metrics-listen",
        metavar="HOST:PORT",
        help="serve /metrics for Prometheus over HTTP, in plain text and without credentials; port 0 lets the system"
        " choose, the line 'ready' tells which (default: none)",
    )
    network.add_argument(
        "--ui",
        metavar="|".join(UI_CHOICES),
        help="serve the web page /ui beside the metrics: blocks, the fork tree and latencies, never tokens (default:"
        " auto = where only this machine can reach --metrics-listen, and gRPC there wants no credentials)",
    )
    network.add_argument("--reflection", action="store_const", const="1", help="serve gRPC reflection, for buf curl")
    network.add_argument(
        "--instance", metavar="NAME", help="name of this server in its handles, for routing (default: the host name)"
    )
    network.add_argument(
        "--drain-grace", metavar="TIME", help="how long live handles are served after SIGTERM (default: 25s)"
    )
    access = parser.add_argument_group("who may connect")
    access.add_argument(
        "--token-file",
        metavar="FILE",
        help="bearer tokens to accept, by their SHA-256, one a line as 'ferrule token NAME' prints it; every call then"
        " needs one; re-read when the file changes",
    )
    access.add_argument(
        "--tls-cert", metavar="FILE", help="PEM certificate chain to serve with; re-read when it changes"
    )
    access.add_argument("--tls-key", metavar="FILE", help="PEM private key of --tls-cert, without a password")
    access.add_argument(
        "--tls-client-ca",
        metavar="FILE",
        help="PEM authorities: clients must show a certificate of one of them; without --token-file its URI SAN or"
        " common name is the principal",
    )
    access.add_argument("--admins", metavar="NAME,...", help="principals of client certificates with the role admin")
    parser.add_argument("--failpoints", help=argparse.SUPPRESS)
    logs = parser.add_argument_group("logs and traces")
    logs.add_argument("--log-level", metavar="|".join(LOG_LEVELS), help="of the log on stderr (default: info)")
    logs.add_argument(
        "--log-format",
        metavar="|".join(LOG_FORMATS),
        help="of the log on stderr: lines for people, or a JSON object a line (default: text)",
    )
    logs.add_argument(
        "--otlp-endpoint",
        metavar="URL",
        help="send a trace of every call to an OpenTelemetry collector there, by OTLP over gRPC:"
        " http://127.0.0.1:4317; what else there is to set is read from the standard OTEL_* variables; needs"
        " ferrule[otel] (default: none)",
    )
    logs.add_argument(
        "--debug-top-tokens",
        action="store_const",
        const="1",
        help="log handle id, position and the five best tokens of every output row: what clients generate can be read"
        " in the log then, and every step is slower",
    )
    return parser


def _add_model(parser: argparse.ArgumentParser) -> None:
    """Add what says which model runs, and on what."""
    model = parser.add_argument_group("model")
    model.add_argument(
        "--model",
        metavar="demo|FOLDER|ORG/NAME",
        help="the small model that ships, a Hugging Face folder with safetensors, or a model on the Hugging Face hub,"
        " whose configuration, tokenizer and safetensors are fetched once and kept in HF_HOME (default: demo)",
    )
    model.add_argument("--revision", metavar="NAME", help="branch, tag or commit of a model on the hub (default: main)")
    model.add_argument(
        "--offline",
        action="store_const",
        const="1",
        help="fetch nothing: a model of the hub must be in the cache already; HF_HUB_OFFLINE=1 does the same",
    )
    model.add_argument(
        "--download-only",
        action="store_const",
        const="1",
        help="fetch a model of the hub, print the folder it is in, and end: for servers that have no network",
    )
    model.add_argument(
        "--executor",
        metavar="|".join(EXECUTORS),
        help="what runs the steps: torch on any device; numba-cuda, kernels of our own on a GPU with torch beside them"
        " and behind them (without a GPU torch serves and says why); paged-reference needs no model and starts at once,"
        " for client authors and tests"
        " (default: auto = numba-cuda on a GPU, else torch)",
    )
    model.add_argument(
        "--device",
        metavar="auto|cpu|cuda|cuda:N",
        help="where the model runs (default: auto = the first GPU, else the processor); a GPU that is named must be"
        " there",
    )
    model.add_argument(
        "--dtype",
        metavar="|".join(DTYPES),
        help="of weights, activations and KV (default: auto = bfloat16 on a GPU, and where the"
        " processor has instructions for it, else float32)",
    )
    model.add_argument(
        "--threads",
        metavar="N",
        help="threads that compute (default: one per core; one in all below 128 MiB of weights)",
    )


_EPILOG: Final = """\
Every flag can be given as an environment variable: --kv-memory as FERRULE_KV_MEMORY, --insecure as
FERRULE_INSECURE=1. Flags win over the environment, the environment over defaults. An empty variable counts as unset;
an empty FERRULE_TOKEN_FILE or FERRULE_TLS_* is an error. ~ is expanded in every path.

examples:
  ferrule serve                                        the demo model on 127.0.0.1:50051
  ferrule serve --model ~/models/Qwen3-0.6B --kv-memory 4GiB
  ferrule serve --model Qwen/Qwen3-0.6B                from the hub; a folder of that name wins
  ferrule serve --model ~/models/Qwen3-8B --device cuda --gpu-memory-fraction 0.8
  ferrule serve --executor paged-reference --listen unix:/tmp/ferrule.sock
  ferrule serve --listen 0.0.0.0:50051 --token-file tokens --tls-cert cert.pem --tls-key key.pem
  ferrule serve --listen 0.0.0.0:50051 --insecure      beyond this machine, on a trusted network
  ferrule serve --metrics-listen 127.0.0.1:9464        metrics, and a page that shows them, at http://127.0.0.1:9464/ui

Without --token-file and --tls-client-ca everybody who can reach the server is one principal, 'local', and handles are
shared; that is allowed on 127.0.0.1, [::1] and unix sockets, elsewhere only with --insecure.

There are kernels for GPUs of compute capability 9.0 (H100, H200) and 8.x (A100, A10, L4, L40S, RTX 30 and 40). A GPU
whose kernels cannot be used, for whatever reason, runs the model in torch: one warning says why, and GetStatus.

When the model is loaded, one line starting 'ready' appears on stdout. SIGTERM or Ctrl-C ends the server: new
prompts are refused, live handles are served until none is left or --drain-grace is over; a second signal ends it at
once. Exit codes: 0 ended as asked, 1 a fault (such as a GPU that is lost: start it again), 2 a setting, address or
model folder is unusable, 130 Ctrl-C before the line 'ready', 128 + its number for a second signal.
"""
