"""One whole layer for one token: the five kernels as a chain, each beginning while the one before it still runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from ferrule_server.kernels import reference
from ferrule_server.kernels.cuda import attention, gemv
from ferrule_server.kernels.cuda.spec import SHARED_LIMITS, KernelSpec, ModelShape
from tools.gpu import attention_cases
from tools.gpu.cases import EPS, Case, Instance, Linear, random_bf16, worst
from tools.gpu.gpu import Call, Gpu


def cases_of(shape: ModelShape) -> list[Case]:
    """Return the chain for one sequence, its attention included, with weights in rings and in registers."""
    return [_case(shape, "rings", gemv.RINGS), _case(shape, "0", (0,))]


def _case(shape: ModelShape, name: str, rings: Sequence[int]) -> Case:
    linears = {role: gemv.planned(it, M=1, limit=SHARED_LIMITS[-1], rings=rings) for role, it in shape.linears.items()}
    attend = attention.specs(shape)[0]
    state: dict[str, Any] = {}

    def build(gpu: Gpu, index: int) -> Instance:
        return _instance(gpu, shape, linears, attend, state=state, index=index)

    weights = sum(Linear(linear, 1, False).num_bytes for linear in shape.linears.values())
    kv = 2 * attention_cases.CONTEXT * shape.num_kv_heads * shape.head_dim * 2
    qkv, *others = linears.values()
    return Case(f"layer M=1 ring={name}", [qkv, attend, *others], weights + kv, build, most_instances=2, state=state)


def _instance(
    gpu: Gpu,
    shape: ModelShape,
    specs: dict[str, KernelSpec],
    attend: KernelSpec,
    *,
    state: dict[str, Any],
    index: int,
) -> Instance:
    attended = attention_cases.instance(gpu, shape, attend, 1, state=state, layer=index)
    (call,) = attended.calls
    hidden = random_bf16(gpu, (1, shape.hidden_size), index)
    act = random_bf16(gpu, (1, shape.intermediate_size), index + 1)
    before, qkv, out = hidden.clone(), call.arguments["qkv"].view(1, -1), call.arguments["out"].view(1, -1)
    between = {"qkv": (hidden, qkv), "attention_out": (out, hidden), "gate_up": (hidden, act), "down": (act, hidden)}
    weights: dict[str, Tensor] = {}
    norms: dict[str, Tensor] = {}
    calls: dict[str, Call] = {}
    for place, (role, linear) in enumerate(shape.linears.items()):
        size = linear.size
        weights[role] = random_bf16(gpu, (Linear(linear, 1, False).weight_rows, size), 50 * index + place, size**-0.5)
        norms[role] = random_bf16(gpu, (size,), 60 + place)
        x, made = between[role]
        given: dict[str, Any] = {"x": x, "out": made, "weight": weights[role], "norm_weight": norms[role]}
        given |= {"bias": 0, "num_rows": linear.num_rows, "size": size, "eps": EPS}
        constants: dict[str, Any] = dict(specs[role].constants)
        grid = gemv.num_ctas_needed(linear.num_rows, constants)
        calls[role] = Call(specs[role], given, min(grid, gpu.num_sms * specs[role].ctas_per_sm))

    def product(role: str, x: Tensor) -> Tensor:
        vectors = reference.rms_norm(x, norms[role], EPS) if role in ("qkv", "gate_up") else x
        return (vectors.float() @ weights[role].float().T).bfloat16()

    def expect() -> Tensor:
        qkv.copy_(product("qkv", before))
        seen = attended.expect().bfloat16().view(1, -1)
        middle = before + product("attention_out", seen)
        gated = reference.activate(product("gate_up", middle), "silu", is_gated=True)
        return middle + product("down", gated)

    def torch_op() -> Tensor:
        def linear(role: str, x: Tensor) -> Tensor:
            is_normed = role in ("qkv", "gate_up")
            return F.linear(F.rms_norm(x, x.shape[-1:], norms[role], EPS) if is_normed else x, weights[role])

        linear("qkv", before)
        seen = attended.torch_op()
        middle = before + linear("attention_out", seen.reshape(1, -1))
        gate, up = linear("gate_up", middle).chunk(2, dim=-1)
        made: Tensor = middle + linear("down", F.silu(gate) * up)
        return made

    def restore() -> None:
        hidden.copy_(before)

    chain = [calls["qkv"], call, calls["attention_out"], calls["gate_up"], calls["down"]]
    outputs = [hidden, act, call.arguments["out"]]
    return Instance(chain, outputs, expect, lambda expected: worst(hidden, expected), torch_op, restore)
