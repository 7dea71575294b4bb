"""The contract stays whole: stubs match their protos, everything is commented, lint is clean, the README holds."""

from __future__ import annotations

import importlib.util
import json
import math
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from google.protobuf import json_format
from google.protobuf.descriptor import FileDescriptor
from google.protobuf.descriptor_pb2 import (
    FieldDescriptorProto,
)
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from ferrule.v1 import admin_pb2, cache_pb2, executor_pb2, info_pb2, policy_pb2, tokenizer_pb2, types_pb2
from ferrule_server import errors
from ferrule_server.api.limits import ApiLimits
from ferrule_server.engine.settings import EngineSettings
from ferrule_server.errors import FerruleError
from tests.reasons import documented, table

ROOT = Path(__file__).resolve().parents[1]
PROTOS = ROOT / "protos"
README = (PROTOS / "README.md").read_text("utf-8")
BUF = Path(sys.executable).with_name("buf")
FILES: tuple[FileDescriptor, ...] = tuple(
    module.DESCRIPTOR for module in (admin_pb2, cache_pb2, executor_pb2, info_pb2, policy_pb2, tokenizer_pb2, types_pb2)
)
WORD = 0xFFFFFFFF


@pytest.fixture(scope="module")
def generator() -> ModuleType:
    """`protos/generate_stubs.py`, which is a script and in no package."""
    spec = importlib.util.spec_from_file_location("generate_stubs", PROTOS / "generate_stubs.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _field_number(message: type[Any], field: str) -> int:
    """Number by which a descriptor's source path names one of its lists."""
    return int(message.DESCRIPTOR.fields_by_name[field].number)


def _buf(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(BUF), *arguments], cwd=PROTOS, capture_output=True, text=True, check=False)


def test_comments_and_table_name_the_same_reasons() -> None:
    """And those of the errors that the server has: what a client can meet is in both."""
    classes = (each for each in vars(errors).values() if isinstance(each, type) and issubclass(each, FerruleError))
    reasons = {each.REASON for each in classes if "REASON" in vars(each)} - {"CANCELLED"}  # which gRPC itself says
    assert frozenset[str]().union(*documented().values()) == table()
    assert reasons == {reason for reason in table() if not reason.startswith("QUOTA_")}


def test_stubs_are_what_the_protos_give(generator: ModuleType) -> None:
    """The committed stubs equal a fresh run of the pinned generator, so a wire change always shows in the diff."""
    assert generator.drifted() == []


def test_check_names_a_stub_that_drifted(
    generator: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`--check` exits 1 with the names of stubs that differ or are left over."""
    present = generator.stub_files

    def with_a_leftover(root: Path) -> dict[str, bytes]:
        files: dict[str, bytes] = present(root)
        return {**files, "ferrule/v1/gone_pb2.py": b""} if root == PROTOS else files

    monkeypatch.setattr(generator, "stub_files", with_a_leftover)
    monkeypatch.setattr(sys, "argv", ["generate_stubs.py", "--check"])
    assert generator.main() == 1
    assert "ferrule/v1/gone_pb2.py" in capsys.readouterr().err


def test_buf_lint_has_no_findings() -> None:
    """STANDARD and COMMENTS of buf, over both modules."""
    result = _buf("lint")
    assert (result.returncode, result.stdout + result.stderr) == (0, "")


def test_protos_are_formatted() -> None:
    """`buf format` would change nothing in either module."""
    result = _buf("format", "--diff", "--exit-code")
    assert (result.returncode, result.stdout + result.stderr) == (0, "")


def test_protos_stay_readable_for_old_compilers(generator: ModuleType) -> None:
    """proto3 and no editions: Debian's protoc 3.21 must read the files."""
    assert {file.syntax for file in generator.describe()} == {"proto3"}


def test_stub_floors_are_the_declared_floors() -> None:
    """The stubs load with the lowest versions that pip installs; so does the oldest health stub."""
    protobuf_floors = {
        ".".join(re.findall(r"\d+", match))
        for path in (PROTOS / "ferrule/v1").glob("*_pb2.py")
        for match in re.findall(r"Domain\.PUBLIC,\s*(\d+,\s*\d+,\s*\d+)", path.read_text("utf-8"))
    }
    grpc_floors = {
        match
        for path in (PROTOS / "ferrule/v1").glob("*_pb2_grpc.py")
        for match in re.findall(r"GRPC_GENERATED_VERSION = '([\d.]+)'", path.read_text("utf-8"))
    }
    dependencies = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["dependencies"]
    declared = {
        match["name"]: match["floor"]
        for match in (re.match(r"(?P<name>[\w-]+)>=(?P<floor>[\d.]+)", line) for line in dependencies)
        if match is not None
    }
    assert protobuf_floors == {declared["protobuf"]}
    assert grpc_floors == {declared["grpcio-health-checking"]}


def test_readme_names_every_call_and_file() -> None:
    """The table of calls in the README is complete."""
    services = [service for file in FILES for service in file.services_by_name.values()]
    section = README[README.index("## Calls") : README.index("## Handles")]
    rows = set(re.findall(r"^\| `([\w.]+)` \|", section, re.MULTILINE))
    default = "ModelExecutorService"
    calls = {
        method.name if service.name == default else f"{service.name}.{method.name}"
        for service in services
        for method in service.methods
    }
    assert rows == calls
    assert all(f"(ferrule/v1/{Path(file.name).name})" in README for file in FILES)


def test_readme_calls_are_valid_requests() -> None:
    """Each `call` example in the README parses into the request of the call it names."""
    examples = re.findall(r"^call (\w+)/(\w+) '(.*)'$", README, re.MULTILINE)
    assert len(examples) >= 5
    services = {service.name: service for file in FILES for service in file.services_by_name.values()}
    for service, method, body in examples:
        request = GetMessageClass(services[service].methods_by_name[method].input_type)
        json_format.Parse(body, request())


def _philox(key: list[int], counter: list[int]) -> list[int]:
    """Philox4x32-10 straight from the paper (Salmon et al., SC 2011), independent of the server's."""
    (k0, k1), (c0, c1, c2, c3) = key, counter
    for _ in range(10):
        p0, p1 = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (p1 >> 32) ^ c1 ^ k0, p1 & WORD, (p0 >> 32) ^ c3 ^ k1, p0 & WORD
        k0, k1 = (k0 + 0x9E3779B9) & WORD, (k1 + 0xBB67AE85) & WORD
    return [c0, c1, c2, c3]


def _first_word(seed: str, position: int, purpose: int) -> int:
    return _philox([int(seed) & WORD, int(seed) >> 32], [position & WORD, purpose, 0, 0])[0]


def _kept(logits: list[float], sample: dict[str, Any]) -> list[int]:
    """Tokens left by temperature, top-k, top-p and min-p, in the plainest way."""
    ranked = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
    if sample["temperature"] == 0:
        return ranked[:1]
    weights = [math.exp(logit / sample["temperature"]) for logit in logits]
    ranked = ranked[: sample["top_k"] or None]
    goal = sample["top_p"] * sum(weights[i] for i in ranked)
    sums = [sum(weights[i] for i in ranked[: n + 1]) for n in range(len(ranked))]
    if sample["top_p"] < 1:
        ranked = ranked[: next(n for n, total in enumerate(sums) if total >= goal) + 1]
    return sorted(i for i in ranked if weights[i] >= sample["min_p"] * weights[ranked[0]])


@pytest.fixture(scope="module")
def vectors() -> dict[str, Any]:
    """The test vectors that the README links."""
    assert "(test_vectors.json)" in README
    found: dict[str, Any] = json.loads((PROTOS / "test_vectors.json").read_text("utf-8"))
    return found


def test_readme_vectors_begin_with_the_published_ones(vectors: dict[str, Any]) -> None:
    """The known answers are those of Random123's `kat_vectors`, so the vectors below them mean Philox4x32-10."""
    published = (
        ("00000000 00000000", "00000000 00000000 00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ("ffffffff ffffffff", "ffffffff ffffffff ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        ("a4093822 299f31d0", "243f6a88 85a308d3 13198a2e 03707344", "d16cfe09 94fdcceb 5001e420 24126ea1"),
    )
    written = [
        tuple(" ".join(f"{word:08x}" for word in answer[part]) for part in ("key", "counter", "output"))
        for answer in vectors["known_answers"]
    ]
    assert written == list(published)
    assert all(_philox(answer["key"], answer["counter"]) == answer["output"] for answer in vectors["known_answers"])


def test_readme_draws_follow_the_counter_layout(vectors: dict[str, Any]) -> None:
    """Key, counter and u are laid out as the README says."""
    for draw in vectors["draws"]:
        assert draw["x0"] == _first_word(draw["seed"], draw["position"], draw["purpose"])
        assert draw["u"] == (draw["x0"] + 0.5) * 2.0**-32


def test_readme_samples_follow_the_sampling_order(vectors: dict[str, Any]) -> None:
    """The tokens kept and drawn are those of a plain implementation of the README's text."""
    logits = vectors["logits"]
    for sample in vectors["samples"]:
        kept = _kept(logits, sample)
        assert kept == sample["kept"]
        weights = [math.exp(logits[i] / (sample["temperature"] or 1)) for i in kept]
        u = (_first_word(sample["seed"], sample["position"], 0) + 0.5) * 2.0**-32
        sums = [sum(weights[: n + 1]) / sum(weights) for n in range(len(kept))]
        assert sample["token"] == next(token for token, total in zip(kept, sums, strict=True) if total > u)


def _draw(weights: dict[int, float], u: float) -> int:
    """The first token, by ascending id, whose cumulative share exceeds u."""
    total, so_far = sum(weights.values()), 0.0
    for token in sorted(weights):
        so_far += weights[token]
        if so_far / total > u:
            return token
    raise AssertionError("u is below 1")


def _distribution(logits: list[float], sample: dict[str, Any]) -> dict[int, float]:
    """Probabilities of the tokens that are left before a draw."""
    weights = {i: math.exp(logits[i] / sample["temperature"]) for i in _kept(logits, sample)}
    return {i: weight / sum(weights.values()) for i, weight in weights.items()}


def test_readme_drafts_are_decided_as_it_says(vectors: dict[str, Any]) -> None:
    """Accepted or replaced by a plain implementation of the README's two steps; both happen."""
    for case in vectors["drafts"]:
        p, draft = _distribution(vectors["logits"], case), case["draft"]
        q = {int(token): prob for token, prob in (case["q"] or {str(draft): 1.0}).items()}
        q = {token: prob / sum(q.values()) for token, prob in q.items()}
        accept, residual = ((_first_word(case["seed"], case["position"], n) + 0.5) * 2.0**-32 for n in (2, 3))
        is_accepted = accept < p.get(draft, 0.0) / q[draft]
        rest = {token: max(prob - q.get(token, 0.0), 0.0) for token, prob in p.items()}
        assert (case["accepted"], case["token"]) == (is_accepted, draft if is_accepted else _draw(rest, residual))
    assert {case["accepted"] for case in vectors["drafts"]} == {True, False}


def test_readme_limits_are_those_of_the_server() -> None:
    """The table of limits names capabilities that exist, with the numbers that the server is made with."""
    defaults = {name: getattr(ApiLimits(), name) for name in ApiLimits.__slots__}
    defaults |= dict.fromkeys(("max_step_rows", "max_batch_size"), EngineSettings().max_step_rows)
    section = README[README.index("## Limits") : README.index("## Errors")]
    named: set[str] = set()
    for names, values in re.findall(r"^\| (`max_[^|]*`) \| ([\d, ]+) \|", section, re.MULTILINE):
        for name, value in zip(re.findall(r"`(\w+)`", names), values.split(", "), strict=True):
            assert defaults[name] == int(value), name
            named.add(name)
    published = {field.name for field in info_pb2.ExecutorCapabilities.DESCRIPTOR.fields}
    assert named == {name for name in published if name.startswith("max_")} - {"max_ttl"}


def test_fields_share_names_and_numbers_across_outputs() -> None:
    """Prefill, decode and verify outputs lay their common fields out alike, so one converter serves all."""
    outputs = (
        executor_pb2.PrefillOutput,
        executor_pb2.DecodeOutput,
        executor_pb2.VerifyOutput,
    )
    common = ("request_id", "kv_cache", "outputs", "timing", "replayed", "recomputed")
    for output in outputs:
        assert [_field_number(output, name) for name in common] == [1, 2, 3, 4, 5, 6]


def test_numbers_that_may_be_zero_have_presence() -> None:
    """Unset and 0 are told apart where 0 is a legal value with another meaning than unset."""
    optional: dict[type[Message], tuple[str, ...]] = {
        policy_pb2.Sample: ("temperature", "top_p", "seed"),
        policy_pb2.Outputs: ("seed",),
        executor_pb2.VerifyOutput: ("next_token",),
        executor_pb2.UnifiedBatchItem: ("pos_offset", "is_final_chunk"),
        executor_pb2.GenerateRequest: ("max_tokens",),
        cache_pb2.ForkCacheRequest: ("count", "length"),
    }
    for message, fields in optional.items():
        assert all(message.DESCRIPTOR.fields_by_name[name].has_presence for name in fields)


def test_tensors_never_travel_as_repeated_floats() -> None:
    """Rows as wide as the vocabulary are bytes: a list of floats costs 37 ms where bytes cost 0.04."""
    for name in ("logits", "hidden_state"):
        assert policy_pb2.Outputs.DESCRIPTOR.fields_by_name[name].message_type is types_pb2.Tensor.DESCRIPTOR
    data = types_pb2.Tensor.DESCRIPTOR.fields_by_name["data"]
    assert data.type == FieldDescriptorProto.TYPE_BYTES


MAX_FIELDS = 460
"""Most fields of the contract. A feature that raises it says in its commit what it cannot do without them."""


def test_the_contract_stays_small() -> None:
    """Fields of all messages; the entries of maps are not counted."""
    files = (admin_pb2, cache_pb2, executor_pb2, info_pb2, policy_pb2, tokenizer_pb2, types_pb2)
    messages = [message for file in files for message in file.DESCRIPTOR.message_types_by_name.values()]
    assert sum(len(message.fields) for message in messages) <= MAX_FIELDS


def test_no_client_looks_into_a_handle() -> None:
    """Not into its secret for the instance, nor for a loggable id: replies carry both."""
    paths = [path for folder in ("client", "examples") for path in (ROOT / folder).rglob("*")]
    sources = [path for path in paths if path.suffix in SOURCES and not GENERATED & set(path.parts)]
    assert len(sources) > 50
    for path in sources:
        assert not LOOKS_INSIDE.search(path.read_text()), path


SOURCES = {".py", ".js", ".ts", ".go", ".rs", ".cc", ".sh"}
GENERATED = {"node_modules", "target", "types"}
METHODS = "split|partition|substr|find|encode|as_bytes|indexOf|match"
LOOKS_INSIDE = re.compile(rf"cache_?id[()]*\.?({METHODS})|(split|sha256)\([^)\n]*cache_?id", re.IGNORECASE)
