"""Compose files as ``docker compose config`` reads them, as far as ours go: variables, anchors, files on top, profiles.

Not a second compose: what a file of ours does not use is refused rather than guessed at.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import yaml

ROOT: Final = Path(__file__).resolve().parents[2]
PLAIN: Final = ROOT / "docker-compose.yml"
RECIPE: Final = ROOT / "deploy" / "Dockerfile"
ON_TOP: Final = tuple(sorted((ROOT / "deploy").glob("compose.*.yml")))

_VARIABLE: Final = re.compile(
    r"\$(?:(?P<dollar>\$)|\{(?P<name>\w+)(?:(?P<operator>:?-)(?P<default>[^}]*))?\}|(?P<bare>\w+))"
)
_REPLACED: Final = frozenset({"command", "entrypoint", "test"})


class _Override(list[Any]):
    """A list that takes the place of the one below it: ``!override``."""


class _Loader(yaml.SafeLoader):
    """Knows the tag of compose that our files use."""


def _override(loader: yaml.SafeLoader, node: yaml.SequenceNode) -> _Override:
    return _Override(loader.construct_sequence(node, deep=True))


_Loader.add_constructor("!override", _override)


def load(paths: Iterable[Path], environment: Mapping[str, str]) -> dict[str, Any]:
    """Return what the files say together, later ones on top of earlier ones.

    Args:
        paths: As after ``-f``.
        environment: Variables to fill in.
    """
    merged: dict[str, Any] = {}
    for path in paths:
        text = path.read_text(encoding="utf-8")
        document = _filled_in(yaml.load(text, Loader=_Loader), environment)  # a SafeLoader
        merged = _merged(merged, {key: value for key, value in document.items() if not key.startswith("x-")})
    return merged


def started(project: Mapping[str, Any], profiles: Sequence[str] = (), names: Sequence[str] = ()) -> list[str]:
    """Return the services that ``docker compose --profile P up NAME ...`` starts, each behind what it depends on."""
    services = project["services"]
    active = [
        name
        for name, service in services.items()
        if "profiles" not in service or not {*profiles}.isdisjoint(service["profiles"])
    ]
    order: list[str] = []

    def add(name: str) -> None:
        if name not in active:
            raise ValueError(f"the profile of {name} is not active")
        for other in services[name].get("depends_on", {}):
            add(other)
        if name not in order:
            order.append(name)

    for name in names or active:
        add(name)
    return order


def image_variables() -> dict[str, str]:
    """Return the variables of ours that the image has."""
    last_stage = RECIPE.read_text("utf-8").rpartition("\nFROM ")[2].replace("\\\n", " ")
    settings = " ".join(re.findall(r"^ENV (.*)$", last_stage, re.MULTILINE))
    return dict(re.findall(r"\b(FERRULE_\w+)=(\S+)", settings))


def variables_of(service: Mapping[str, Any], folder: Path, shell: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that compose gives to the container of a service.

    Args:
        service: Of a project.
        folder: Where the optional files are that ``env_file`` names; required ones are ours.
        shell: Variables that compose runs with: they fill in these files, and what ``environment`` has without a value.
    """
    found: dict[str, str] = {}
    for entry in service.get("env_file", []):
        path = (ROOT if entry["required"] else folder) / entry["path"]
        if not path.exists() and not entry["required"]:
            continue
        found |= _filled_in(dict(re.findall(r"^(\w+)=(.*)$", path.read_text("utf-8"), re.MULTILINE)), shell)
    for name, value in service.get("environment", {}).items():
        found.pop(name, None)
        given = shell.get(name) if value is None else value
        found |= {} if given is None else {name: given}
    return found


def _filled_in(value: Any, environment: Mapping[str, str]) -> Any:
    if isinstance(value, dict):
        return {key: _filled_in(inner, environment) for key, inner in value.items()}
    if isinstance(value, list):
        return type(value)(_filled_in(inner, environment) for inner in value)
    return _VARIABLE.sub(lambda found: _value_of(found, environment), value) if isinstance(value, str) else value


def _value_of(found: re.Match[str], environment: Mapping[str, str]) -> str:
    if found["dollar"]:
        return "$"
    value = environment.get(found["name"] or found["bare"])
    if value is None or (value == "" and found["operator"] == ":-"):
        if found["default"] is None:
            raise ValueError(f"{found[0]} has no default: compose would take an empty text and warn")
        return found["default"]
    return value


def _merged(below: dict[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    result = dict(below)
    for key, value in above.items():
        old = result.get(key)
        if isinstance(value, dict) and isinstance(old, dict):
            result[key] = _merged(old, value)
        elif isinstance(value, list) and isinstance(old, list) and not isinstance(value, _Override):
            result[key] = value if key in _REPLACED else [*old, *(item for item in value if item not in old)]
        else:
            result[key] = list(value) if isinstance(value, list) else value
    return result
