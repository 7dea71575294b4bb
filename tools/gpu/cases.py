"""What is measured of each op: buffers at the sizes of a model, what is expected, how many bytes move."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ferrule_server.kernels import reference
from ferrule_server.kernels.cuda import (
    add_norm,
    argmax,
    embed,
    gemm,
    gemv,
    head,
)
from ferrule_server.kernels.cuda.spec import SHARED_LIMITS, KernelSpec, LinearShape, ModelShape
from tools.gpu.gpu import Call, Gpu

EPS = 1e-6
_RINGS = (gemv.RINGS, (2,), (0,))
"""What is compared of products with vectors: the ring of a large multiprocessor, of a small one, and registers."""


@dataclass
class Instance:
    """One set of buffers of an op.

    Attributes:
        calls: The kernels of the op, in order.
        outputs: What they write, for comparison bit by bit.
        expect: Returns what is expected, from the state before the first launch.
        check: Given that, returns the worst error in units of what is allowed.
        torch_op: The same op in torch, without allocations that matter.
        restore: Puts back what the op changes in place.
    """

    calls: list[Call]
    outputs: list[Tensor]
    expect: Callable[[], Any]
    check: Callable[[Any], float]
    torch_op: Callable[[], Any]
    restore: Callable[[], None] = lambda: None


@dataclass
class Case:
    """An op at one size.

    Attributes:
        name: ``gemv qkv M=1``.
        specs: Its kernels.
        num_bytes: Moved by definition: read once, written once.
        build: Makes instance i; instances share nothing that a cache could keep for the next.
        bar: Share of the read ceiling that is asked of it, if any.
        most_instances: Where memory or meaning limits them.
    """

    name: str
    specs: list[KernelSpec]
    num_bytes: int
    build: Callable[[Gpu, int], Instance]
    bar: float | None = None
    most_instances: int = 32
    state: dict[str, Any] = field(default_factory=dict)


def random_bf16(gpu: Gpu, shape: Sequence[int], seed: int, scale: float = 1.0) -> Tensor:
    """Return normal values; in a dry run, whatever memory holds, because nobody reads it."""
    if gpu.is_dry:
        return torch.empty(tuple(shape), dtype=torch.bfloat16)
    generator = torch.Generator(gpu.torch_device).manual_seed(seed)
    values = torch.empty(tuple(shape), dtype=torch.bfloat16, device=gpu.torch_device)
    return values.normal_(0.0, scale, generator=generator)


def zeros(gpu: Gpu, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return zeros on the device."""
    return torch.zeros(tuple(shape), dtype=dtype, device=gpu.torch_device)


def worst(found: Tensor, expected: Tensor) -> float:
    """Return the worst error of bf16 results: allowed are 2^-7 of the value and 2^-6 of the root mean square."""
    expected = expected.float()
    allowed = expected.abs() * 2**-7 + expected.square().mean().sqrt() * 2**-6
    return float(((found.float() - expected).abs() / allowed).nan_to_num(torch.inf).max())


def unequal(found: Tensor, expected: Tensor) -> float:
    """Return infinity unless two tensors hold the same bits."""
    return 0.0 if torch.equal(_bits(found), _bits(expected)) else torch.inf


def _bits(values: Tensor) -> Tensor:
    return values.contiguous().view(torch.uint8)


@dataclass(frozen=True)
class Linear:
    """A linear of the model with what stands before and behind it."""

    shape: LinearShape
    num_tokens: int
    is_normed: bool

    @property
    def weight_rows(self) -> int:
        """Rows of the weight: gate and up for swiglu."""
        return self.shape.num_rows * (2 if self.shape.epilogue == "swiglu" else 1)

    @property
    def num_bytes(self) -> int:
        """Weights, once."""
        return 2 * self.weight_rows * self.shape.size

    def instance(self, gpu: Gpu, seed: int, call: Callable[[dict[str, Any]], Call]) -> Instance:
        """Return buffers for it; ``call`` makes the launch of them by parameter name."""
        num_rows, size, epilogue = self.shape.num_rows, self.shape.size, self.shape.epilogue
        x = random_bf16(gpu, (self.num_tokens, size), seed)
        norm = random_bf16(gpu, (size,), seed + 1)
        weight = random_bf16(gpu, (self.weight_rows, size), seed + 2, size**-0.5)
        dtype = torch.float32 if epilogue == "logits" else torch.bfloat16
        out = random_bf16(gpu, (self.num_tokens, num_rows), seed + 3).to(dtype)
        before = out.clone()
        given = {"x": x, "norm_weight": norm, "weight": weight, "bias": 0, "out": out}
        given |= {"num_rows": num_rows, "size": size, "eps": EPS, "num_tokens": self.num_tokens}

        def multiplied(vectors: Tensor) -> Tensor:
            return vectors.float() @ weight.float().T

        def expect() -> Tensor:
            made = multiplied(reference.rms_norm(x, norm, EPS) if self.is_normed else x).bfloat16()
            if epilogue == "swiglu":
                return reference.activate(made, "silu", is_gated=True)
            return before + made if epilogue == "residual" else made

        def torch_op() -> Tensor:
            vectors = F.rms_norm(x, (size,), norm, EPS) if self.is_normed else x
            made = F.linear(vectors, weight)
            if epilogue == "swiglu":
                gate, up = made.chunk(2, dim=-1)
                return F.silu(gate) * up
            return before + made if epilogue == "residual" else made

        return Instance(
            [call(given)], [out], expect, lambda expected: worst(out, expected), torch_op, lambda: _put(out, before)
        )


def _put(target: Tensor, source: Tensor) -> None:
    target.copy_(source)


def gemv_case(role: str, shape: LinearShape, spec: KernelSpec) -> Case:
    """Return a linear for one or two tokens."""
    constants: dict[str, Any] = dict(spec.constants)
    linear = Linear(shape, constants["M"], constants["NORM"])

    def build(gpu: Gpu, index: int) -> Instance:
        grid = min(gemv.num_ctas_needed(shape.num_rows, constants), _wave(gpu, spec))
        shared = gemv.shared_bytes(shape.size, constants)
        return linear.instance(gpu, index, lambda given: Call(spec, given, grid, shared))

    name = f"gemv {role} M={linear.num_tokens} ring={constants['RING']}"
    return Case(name, [spec], linear.num_bytes, build, bar=0.9)


def gemm_case(role: str, shape: LinearShape, spec: KernelSpec) -> Case:
    """Return a linear for up to 64 tokens."""
    constants: dict[str, Any] = dict(spec.constants)
    linear = Linear(shape, 8 * constants["TILES"], False)

    def build(gpu: Gpu, index: int) -> Instance:
        grid = min(gemm.num_ctas_needed(shape), _wave(gpu, spec))
        part_size, part_bits = gemm.split(shape)
        more: dict[str, Any] = {"part_size": part_size, "part_bits": part_bits}
        more["partials"] = zeros(gpu, (gemm.num_ctas_needed(shape) * 64 * gemm.MAX_TOKENS,), torch.float32)
        more["tickets"] = zeros(gpu, (gemm.num_ctas_needed(shape),), torch.int32)
        return linear.instance(gpu, index, lambda given: Call(spec, {**given, **more}, grid))

    return Case(f"gemm {role} M={linear.num_tokens}", [spec], linear.num_bytes, build, most_instances=8)


def head_case(shape: ModelShape, spec: KernelSpec) -> Case:
    """Return the output head with its argmax."""
    constants: dict[str, Any] = dict(spec.constants)
    m, vocab = constants["M"], shape.vocab_size
    linear = Linear(shape.head, m, True)

    def build(gpu: Gpu, index: int) -> Instance:
        grid = _wave(gpu, spec)
        tokens = zeros(gpu, (m,), torch.int32)
        more = {"logits": zeros(gpu, (m, vocab), torch.float32), "tokens": tokens}
        more |= {"partials": zeros(gpu, (grid, m), torch.int64), "ticket": zeros(gpu, (1,), torch.int32)}
        made = linear.instance(
            gpu,
            index,
            lambda given: Call(spec, {**given, **more, "hidden": given["x"], "vocab_size": vocab}, grid),
        )

        def check(expected: Tensor) -> float:
            chosen = expected.float().gather(1, tokens.long().unsqueeze(1)).squeeze(1)
            best = expected.float().amax(1)
            return float(((best - chosen) / (best.abs() * 2**-7)).max())

        return Instance(made.calls, [tokens], made.expect, check, lambda: made.torch_op().argmax(-1))

    return Case(f"head M={m} ring={constants['RING']}", [spec], linear.num_bytes, build, most_instances=2)


def argmax_case(shape: ModelShape, spec: KernelSpec) -> Case:
    """Return the best tokens of 8 rows of logits."""
    constants: dict[str, Any] = dict(spec.constants)
    num_rows, vocab = 8, shape.vocab_size

    def build(gpu: Gpu, index: int) -> Instance:
        logits = random_bf16(gpu, (num_rows, vocab), index).float()
        tokens = zeros(gpu, (num_rows,), torch.int32)
        slices = -(-vocab // constants["SLICE"])
        given: dict[str, Any] = {"logits": logits, "tokens": tokens, "num_rows": num_rows, "vocab_size": vocab}
        given["partials"] = zeros(gpu, (num_rows, slices), torch.int64)
        given["tickets"] = zeros(gpu, (num_rows,), torch.int32)
        return Instance(
            [Call(spec, given, min(num_rows * slices, _wave(gpu, spec)))],
            [tokens],
            lambda: reference.best_tokens(logits, is_masked=False),
            lambda expected: unequal(tokens, expected.int()),
            lambda: logits.argmax(-1),
        )

    return Case(f"argmax rows={num_rows}", [spec], 4 * num_rows * vocab, build)


def embed_case(shape: ModelShape, spec: KernelSpec) -> Case:
    """Return the gather of 64 embeddings, every other of a token that the step before chose."""
    num_rows, size = 64, shape.hidden_size

    def build(gpu: Gpu, index: int) -> Instance:
        table = random_bf16(gpu, (4096, size), index)
        ids = torch.arange(num_rows, dtype=torch.int32, device=gpu.torch_device) * 61
        places = torch.arange(num_rows, dtype=torch.int32, device=gpu.torch_device)
        hidden = random_bf16(gpu, (num_rows, size), index + 1)
        given: dict[str, Any] = {"token_ids": torch.where(places % 2 == 0, ids, -2 - places), "sampled": ids}
        given |= {"table": table, "hidden": hidden}
        given |= {"num_rows": num_rows, "num_sampled": num_rows, "table_rows": 4096, "size": size}
        return Instance(
            [Call(spec, given, num_rows)],
            [hidden],
            lambda: table[ids.long()],
            lambda expected: unequal(hidden, expected),
            lambda: F.embedding(ids, table),
        )

    return Case("embed rows=64", [spec], 4 * num_rows * size, build)


def add_norm_case(shape: ModelShape, spec: KernelSpec) -> Case:
    """Return addition and norm of 64 rows."""
    constants: dict[str, Any] = dict(spec.constants)
    num_rows, size, adds = 64, shape.hidden_size, constants["ADD"]

    def build(gpu: Gpu, index: int) -> Instance:
        hidden, delta, normed = (random_bf16(gpu, (num_rows, size), 10 * index + i) for i in range(3))
        norm, before = random_bf16(gpu, (size,), 10 * index + 4), hidden.clone()
        given: dict[str, Any] = {"hidden": hidden, "delta": delta, "norm_weight": norm, "normed": normed}
        given |= {"num_rows": num_rows, "size": size, "eps": EPS}
        shared = add_norm.shared_bytes(X=constants["X"], WARPS=constants["WARPS"])

        def expect() -> tuple[Tensor, Tensor]:
            added = before + delta if adds else before
            return added, reference.rms_norm(added, norm, EPS)

        def torch_op() -> Tensor:
            return F.rms_norm(before + delta if adds else before, (size,), norm, EPS)

        return Instance(
            [Call(spec, given, min(num_rows, _wave(gpu, spec)), shared)],
            [hidden, normed],
            expect,
            lambda expected: max(unequal(hidden, expected[0]), worst(normed, expected[1])),
            torch_op,
            lambda: _put(hidden, before),
        )

    return Case(f"add_norm rows=64{'' if adds else ' first'}", [spec], (8 if adds else 4) * num_rows * size, build)


def _wave(gpu: Gpu, spec: KernelSpec) -> int:
    return gpu.num_sms * spec.ctas_per_sm


def _gemv_cases(shape: ModelShape) -> Iterator[Case]:
    """Yield the linears of a layer for one and two tokens, with weights in rings and in registers."""
    for (role, linear), m in product(shape.linears.items(), (1, 2)):
        variants = (gemv.planned(linear, M=m, limit=SHARED_LIMITS[-1], rings=rings) for rings in _RINGS)
        yield from (gemv_case(role, linear, spec) for spec in dict.fromkeys(variants))


def _head_cases(shape: ModelShape) -> Iterator[Case]:
    for m in (1, 2):
        variants = (head.planned(shape, M=m, limit=SHARED_LIMITS[-1], rings=rings) for rings in _RINGS)
        yield from (head_case(shape, spec) for spec in dict.fromkeys(variants))


def _gemm_cases(shape: ModelShape) -> Iterator[Case]:
    """Yield each linear for all numbers of tokens that kernels are built for."""
    for role, linear in {**shape.linears, "head": shape.head}.items():
        for tiles in gemm.TILES_BUILT:
            yield gemm_case(role, linear, gemm.spec(TILES=tiles, EPILOGUE=linear.epilogue))


def cases_of(op: str, shape: ModelShape, specs: Sequence[KernelSpec] | None = None) -> list[Case]:
    """Return the cases of one op, with the default kernels or with others that are to be compared."""
    from tools.gpu import attention_cases, layer_cases, logit_cases

    simple: dict[str, Callable[[], Iterable[Case]]] = {
        "gemv": lambda: _gemv_cases(shape),
        "gemm": lambda: _gemm_cases(shape),
        "argmax": lambda: (argmax_case(shape, spec) for spec in specs or argmax.specs(shape)),
        "head": lambda: _head_cases(shape),
        "embed": lambda: (embed_case(shape, spec) for spec in specs or embed.specs(shape)),
        "add_norm": lambda: (add_norm_case(shape, spec) for spec in specs or add_norm.specs(shape)),
    }
    if op == "layer":
        return layer_cases.cases_of(shape)
    if op in simple:
        return list(simple[op]())
    if op == "attention":
        return attention_cases.cases_of(shape, specs)
    return logit_cases.cases_of(op, shape, specs)
