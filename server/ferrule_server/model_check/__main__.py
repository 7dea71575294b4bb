"""``python -m ferrule_server.model_check``: the command ``ferrule models``; with ``--model MODEL``, ``ferrule check``.

Exit codes: 0 done, and the model loads; 1 it does not load; 2 used wrongly; 130 Ctrl-C.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Final

from ferrule_server.arguments import as_given, parse_config
from ferrule_server.errors import ConfigError
from ferrule_server.model.families import WRAPPERS
from ferrule_server.model_check.catalogue import KnownFamily, known_families
from ferrule_server.model_check.report import Cached, Details, Report, check_model, list_cached

_FLAGS: Final = ("--activations", "--dtype", "--executor", "--ignore-config-key", "--max-context", "--weights")
_VARIABLES: Final = frozenset(
    f"FERRULE_{name}"
    for name in (
        "ACTIVATIONS", "CONFIG", "DEVICE", "DISABLE_CUDA_RUNNER", "DTYPE", "EXECUTOR", "IGNORE_CONFIG_KEY",
        "KV_MEMORY", "MAX_CONTEXT", "OFFLINE", "REVISION", "WEIGHTS",
    )
)  # fmt: skip
"""The settings of a server that change how a model loads, and the file that may have them."""
_UNITS: Final = ((1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code: ``check`` if ``--model`` is given, else ``models``."""
    parser = argparse.ArgumentParser(prog="ferrule", allow_abbrev=False)
    for flag in ("--model", *_FLAGS):
        parser.add_argument(flag)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args(arguments)
    try:
        return _models(is_json=args.json) if args.model is None else _check(args)
    except KeyboardInterrupt:
        return 130
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("ferrule"):
            raise
        return _misuse(f"the module {error.name!r} is missing: install ferrule-server", is_json=args.json)


def _check(args: argparse.Namespace) -> int:
    environment = {name: value for name, value in os.environ.items() if name in _VARIABLES}
    values = {"--model": args.model} | {flag: getattr(args, flag[2:].replace("-", "_")) for flag in _FLAGS}
    given = [f"{flag}={value}" for flag, value in values.items() if value is not None]
    try:
        config = parse_config(given, environment)
        if config.executor == "paged-reference":
            raise ConfigError("--executor paged-reference runs no model")
        report = check_model(config)
    except ConfigError as error:
        return _misuse(as_given(str(error), given, environment), is_json=args.json)
    sys.stdout.write((json.dumps(report.facts()) if args.json else _text_of(report)) + "\n")
    return 0 if report.loads else 1


def _misuse(message: str, *, is_json: bool) -> int:
    line = json.dumps({"error": message, "reason": "USED_WRONGLY"}) if is_json else f"error: {message}"
    sys.stderr.write(f"{line}\n")
    return 2


def _text_of(report: Report) -> str:
    if report.details is None:
        advice = f"\ntry {report.instead}" if report.instead else ""
        return f"{report.model} does not load: {report.reason}{advice}"
    details = report.details
    reason = f" ({details.path_reason})" if details.path_reason else ""
    parameters = f"{_count(details.num_parameters)} parameters"
    per_token, longest = size(details.kv_bytes_per_token), size(details.kv_bytes)
    rows = {
        "architecture": f"{details.architecture}, {details.num_layers} layers, {parameters}",
        "runs on": f"{details.executor} on {details.device} in {details.dtype}{reason}",
        "processor": details.processor_kernels or "its kernels can run this model",
        "GPU": details.gpu_kernels or "its kernels can run this model",
        "weights": _weights_text(details),
        "each token": _active_text(details),
        "KV": f"{per_token} per token, {longest} for {details.max_context} tokens",
        "left out": ", ".join(details.left_out),
        "download": size(details.download_bytes) if details.download_bytes else "",
    }
    lines = [f"{name:<14}{text}" for name, text in rows.items() if text]
    lines += [f"{'warning':<14}{text}" for text in details.warnings]
    memory = "memory here" if details.memory.fits else "memory here, too little: a server would end with exit code 2"
    return "\n".join([f"{report.model} loads", *lines, memory, details.memory.table()])


def _weights_text(details: Details) -> str:
    chosen = details.dtype if details.weights == "float" else details.weights
    sizes = details.weights_bytes_by_type
    others = ", ".join(f"{name} {size(num)}" for name, num in sizes.items() if name != chosen)
    if details.packed_types:  # the types of --dtype do not change them; torch unpacks them, to as many bits as float16
        others = f"{size(sizes['float16'])} in torch"
    types, bits = ", ".join((*details.packed_types, chosen)), 8 * details.weights_bytes / details.num_parameters
    return f"{size(details.weights_bytes)} as {types}: {bits:.3g} bits per weight ({others})"


def _active_text(details: Details) -> str:
    if details.most_tokens_per_s is None:
        return ""
    rate = details.active_bytes * details.most_tokens_per_s / 1e9
    most = f"at most about {details.most_tokens_per_s:.3g} tokens/s of one sequence at {rate:.3g} GB/s, measured now"
    return f"reads {size(details.active_bytes)} of them: {most}"


def _models(*, is_json: bool) -> int:
    families, cached = known_families(), list_cached()
    wrappers = [wrapper.architecture for wrapper in WRAPPERS]
    if is_json:
        facts = {"families": [asdict(family) for family in families], "wrappers": wrappers}
        sys.stdout.write(json.dumps(facts | {"cached": [asdict(model) for model in cached]}) + "\n")
        return 0
    lines = [line for family in families for line in _family_lines(family)]
    lines += [f"{name}: the text model alone" for name in wrappers]
    lines += ["", "in the cache of the hub:" if cached else "the cache of the hub has no models"]
    lines += [_cached_line(model) for model in cached]
    sys.stdout.write("\n".join(lines) + "\n")
    return 0


def _family_lines(family: KnownFamily) -> list[str]:
    kernels = [
        name for name, reason in (("processor", family.processor_kernels), ("GPU", family.gpu_kernels)) if not reason
    ]
    path = f"kernels: {', '.join(kernels)}" if kernels else "torch"
    rows = {"models": family.models, "needs": family.differs, "path": path}
    return [family.architecture, *(f"  {name:<8}{text}" for name, text in rows.items() if text)]


def _cached_line(model: Cached) -> str:
    return f"  {model.model}  {size(model.disk_bytes)}  {'loads' if model.loads else f'does not load: {model.reason}'}"


def size(num_bytes: int) -> str:
    """Return a number of bytes for people."""
    for unit, name in _UNITS:
        if num_bytes >= unit:
            return f"{num_bytes / unit:.3g} {name}" if num_bytes < 1000 * unit else f"{num_bytes / unit:.0f} {name}"
    return f"{num_bytes} bytes"


def _count(number: int) -> str:
    return f"{number / 1e9:.3g} billion" if number >= 10**9 else f"{number / 1e6:.3g} million"


if __name__ == "__main__":
    sys.exit(main())
