"""Every family of models on the kernels: the logits of the torch executor, and bits that depend on nothing else."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ferrule_server.executor.base import Executor, Float32Array, OutputSpec
from ferrule_server.executor.cpu import support
from ferrule_server.executor.cpu.executor import NumbaCpuExecutor
from ferrule_server.executor.cpu.support import choose, unsupported
from ferrule_server.kernels.cpu.plan import WeightKind
from ferrule_server.model.config import ClampedSwiglu, LayerKind, ModelConfig, PerLayerInput
from ferrule_server.model.config_reader import read_config
from ferrule_server.model.weights import DTypeName, load_model
from tests.configs import uniform_config
from tests.executor.cpu.models import QUANTISED_SETS, running
from tests.executor.cpu.test_against_torch import torch_executor
from tests.executor.cpu.test_quantised import oracle_of
from tests.executor.cpu.test_weights import unpacked
from tests.model.conftest import CASES, LONG_ROPE, make_example
from tests.model.stepping import Piece, PooledSequence, Stepper

SIZES = {
    "hidden_size": 128, "intermediate_size": 200, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
}  # fmt: skip
"""Heads of 32, for which other tests compile kernels too."""
LONG_FACTORS = {"short_factor": [1.0, 1.2, 1.5, 2.0] * 2, "long_factor": [1.5, 2.5, 4.0, 6.0] * 2}
QUANTISED = [
    "gemma2-window-softcap", "olmo3-windows", "cohere2-parallel", "starcoder2-layernorm",
    "gemma4-shared-kv-second-embedding", "qwen2-moe-shared-gate", "qwen3-moe",
]  # fmt: skip
"""Together they have every feature."""
LENGTH = 330
"""Beyond a tile of attention."""

Folder = Callable[[str], Path]


def case_of(name: str) -> dict[str, Any]:
    """Return a case with sizes that the kernels compute."""
    case = {**CASES[name], **SIZES}
    if "head_dim" in case:
        case["head_dim"] = 32
    if "moe_intermediate_size" in case:
        case["moe_intermediate_size"] = 96
    if case["family"] == "Gemma4":
        case |= {"global_head_dim": 96, "hidden_size_per_layer_input": 4 * case["hidden_size_per_layer_input"]}
    if case.get("rope_parameters") == LONG_ROPE:
        case["rope_parameters"] = {**LONG_ROPE, **LONG_FACTORS}
    return case


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    """Return the folder of a random model of a family, made when it is first asked for."""
    made: dict[str, Path] = {}

    def folder(name: str) -> Path:
        if name not in made:
            made[name] = make_example(case_of(name), tmp_path_factory.mktemp("model")).folder
        return made[name]

    return folder


def prompts_of(vocab_size: int) -> list[list[int]]:
    """Return the tokens of three sequences."""
    return [
        [(7 * i + i // 5 + start) % vocab_size for i in range(length)]
        for start, length in ((3, LENGTH), (9, 1), (40, 17))
    ]


def all_logits(executor: Executor) -> Float32Array:
    """Return the logits of all positions of three sequences, run in one step, and of a decode after each."""
    stepper = Stepper(executor)
    prompts = prompts_of(executor.info.model.config.vocab_size)
    seqs = [PooledSequence() for _ in prompts]
    chunks = [Piece(seq, prompt, num_outputs=len(prompt)) for seq, prompt in zip(seqs, prompts, strict=True)]
    return np.concatenate((stepper.logits(*chunks), stepper.logits(*(Piece(seq, [7]) for seq in seqs))))


@dataclass(frozen=True)
class Family:
    """A random model of a family, the logits of plain torch in float32, and an executor of up to three threads."""

    folder: Path
    exact: Float32Array
    executor: NumbaCpuExecutor


@pytest.fixture(scope="module", params=CASES)
def family(request: pytest.FixtureRequest, folder_of: Folder) -> Iterator[Family]:
    """What the tests of a family share."""
    folder = folder_of(request.param)
    exact = all_logits(torch_executor(folder, "float32", is_plain=True))
    with running(folder, "float32", num_threads=3) as executor:
        yield Family(folder, exact, executor)


def test_float32_logits_equal_plain_torch(family: Family) -> None:
    """Only the order of sums differs."""
    found, expected = all_logits(family.executor), family.exact
    np.testing.assert_allclose(found, expected, rtol=0, atol=2e-4 * float(expected.std()) + 2e-5)


def test_bfloat16_logits_are_as_near_as_those_of_torch(family: Family) -> None:
    """Nearer, because the residual stream stays float32."""
    exact, rounded = family.exact, all_logits(torch_executor(family.folder, "bfloat16"))
    with running(family.folder, "bfloat16") as executor:
        found = all_logits(executor)
    assert np.sqrt(np.square(found - exact).mean()) <= np.sqrt(np.square(rounded - exact).mean())


@pytest.mark.parametrize("kind", ["int8", "int4"])
@pytest.mark.parametrize("name", QUANTISED)
def test_logits_are_those_of_the_quantised_weights(folder_of: Folder, name: str, kind: WeightKind) -> None:
    """As torch computes them with the weights that the integers stand for, which are unpacked."""
    folder = folder_of(name)
    expected = all_logits(oracle_of(folder, kind))
    with running(folder, "float32", QUANTISED_SETS[-1], weights=kind) as executor:
        found = all_logits(executor)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-2 * float(expected.std()))
    assert np.square(found - expected).mean() <= 1e-3**2 * expected.var()


def in_parts(executor: Executor, chunks: Iterable[int]) -> Float32Array:
    """Return the logits of all positions of a sequence, run in chunks beside another one."""
    sizes = iter(chunks)
    stepper, seq, mate = Stepper(executor, seed=3), PooledSequence(), PooledSequence()
    tokens = prompts_of(executor.info.model.config.vocab_size)[0]
    none = OutputSpec()
    parts: list[Float32Array] = []
    while seq.length < LENGTH:
        chunk = tokens[seq.length : seq.length + next(sizes)]
        rows = stepper.run(Piece(seq, chunk, num_outputs=len(chunk)), Piece(mate, chunk[:3], spec=none))
        parts += [row.logits for row in rows if row.logits is not None]
    return np.stack(parts)


def test_the_same_bits_in_chunks_of_any_size(family: Family) -> None:
    """Windows begin at other tokens for each row, yet what rows share a task changes nothing, nor do threads."""
    sizes = [100, 1, 1, 1, 17, 33, 1, 100, 1, 1, 5, 60, *[1] * LENGTH]
    expected = in_parts(family.executor, [LENGTH])
    with running(family.folder, "float32", num_threads=1) as executor:
        for found in (in_parts(executor, sizes), in_parts(family.executor, sizes)):
            np.testing.assert_array_equal(found.view(np.uint32), expected.view(np.uint32))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("name", CASES)
def test_unpacked_weights_are_those_that_were_packed(folder_of: Folder, name: str, dtype: DTypeName) -> None:
    """Packing loses nothing: every tensor can be found again, bit for bit, and a tied head is the embedding."""
    folder = folder_of(name)
    expected, found = load_model(folder, dtype=dtype).take_weights(), unpacked(folder, dtype)
    assert (found.head is found.embedding) == (expected.head is expected.embedding)
    for one, other in zip([found.parts, *found.layers], [expected.parts, *expected.layers], strict=True):
        assert one.keys() == other.keys()
        assert all(one[name].dtype == other[name].dtype and torch.equal(one[name], other[name]) for name in other)


@pytest.mark.parametrize("name", CASES)
def test_every_family_is_chosen(folder_of: Folder, name: str) -> None:
    """Kernels are compiled for each size of heads, never for a family."""
    config = read_config(folder_of(name))
    assert unsupported(config) == ""
    plan = choose(config, "bfloat16").plan
    assert plan is not None
    assert replace(plan, head_dim=32) == choose(uniform_config(head_dim=32), "bfloat16").plan


PLAIN = uniform_config(num_layers=2, head_dim=32)
KIND = PLAIN.layers[0]


def with_second(kind: LayerKind) -> ModelConfig:
    """Return a network whose second layer is another one."""
    return replace(PLAIN, layers=(KIND, kind))


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (replace(PLAIN, has_layer_norm=True, has_norm_after=True), "has_norm_after"),
        (replace(PLAIN, per_layer_input=PerLayerInput(64, 8)), "a second embedding of 64 tokens and 8 values"),
        (replace(PLAIN, per_layer_input=PerLayerInput(63, 32)), "a second embedding of 63 tokens and 32 values"),
        (with_second(replace(KIND, kv_layer=0, head_dim=64)), "K and V of another layer with other heads"),
        (with_second(replace(KIND, head_dim=48)), "heads of several widths"),
        (replace(with_second(replace(KIND, kv_layer=0)), qk_norm="row"), "norms of all heads of a row"),
        (replace(with_second(replace(KIND, is_value_key=True)), qk_norm="row"), "norms of all heads of a row"),
        (with_second(replace(KIND, chunk=64)), "they do not compute attention in chunks"),
        (with_second(replace(KIND, has_sinks=True)), "they do not compute attention sinks"),
        (replace(PLAIN, clamped_swiglu=ClampedSwiglu(7.0, 1.7)), "they do not compute a clamped SwiGLU"),
        (replace(PLAIN, hidden_size=72), "hidden_size 72 is not a multiple of 16"),
        (uniform_config(head_dim=24), "head_dim 24 is not a multiple of 16"),
    ],
)
def test_what_the_kernels_do_not_compute_is_refused(config: ModelConfig, reason: str) -> None:
    """Torch runs such a model, and the reason is told."""
    assert reason in unsupported(config)
    choice = choose(config, "bfloat16")
    assert choice.plan is None
    assert reason in choice.reason


def test_a_feature_that_the_kernels_do_not_know_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A new field of a network is never ignored: it has to be listed first."""
    known = support._KNOWN_FIELDS
    monkeypatch.setattr(support, "_KNOWN_FIELDS", known - {"logit_softcap"})
    assert unsupported(replace(PLAIN, logit_softcap=30.0)) == "they do not compute logit_softcap"
    assert unsupported(PLAIN) == ""


def test_float16_is_refused() -> None:
    """The kernels would take its weights for those of another type."""
    assert choose(PLAIN, "float16").plan is None
