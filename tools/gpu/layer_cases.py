"""One whole layer for one token: the five kernels as a chain, each beginning while the one before it still runs."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor

from ferrule_server.kernels import reference
from ferrule_server.kernels.cuda import attention, gemv
from ferrule_server.kernels.cuda.spec import KernelSpec, ModelShape
from tools.gpu import attention_cases
from tools.gpu.cases import EPS, Case, Instance, random_bf16, sizes, worst
from tools.gpu.gpu import Call, Gpu

ROLES = ("qkv", "o", "gate_up", "down")


def cases_of(shape: ModelShape) -> list[Case]:
    """Return the chain for one sequence, its attention included."""
    linears = {role: _spec(shape, role) for role in ROLES}
    attend = attention.specs(shape)[0]
    state: dict[str, Any] = {}

    def build(gpu: Gpu, index: int) -> Instance:
        return _instance(gpu, shape, linears, attend, state=state, index=index)

    weights = sum(_bytes(shape, role) for role in ROLES)
    kv = 2 * attention_cases.CONTEXT * shape.num_kv_heads * shape.head_dim * 2
    specs = [linears["qkv"], attend, *(linears[role] for role in ROLES[1:])]
    return [Case("layer M=1", specs, weights + kv, build, most_instances=2, state=state)]


def _bytes(shape: ModelShape, role: str) -> int:
    epilogue, num_rows, size = sizes(shape, role)
    return 2 * num_rows * size * (2 if epilogue == "swiglu" else 1)


def _spec(shape: ModelShape, role: str) -> KernelSpec:
    epilogue, num_rows, size = sizes(shape, role)
    norm = role in ("qkv", "gate_up")
    return gemv.planned(num_rows, size, M=1, NORM=norm, EPILOGUE=epilogue, BIAS=False)


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
    between = {"qkv": (hidden, qkv), "o": (out, hidden), "gate_up": (hidden, act), "down": (act, hidden)}
    weights: dict[str, Tensor] = {}
    norms: dict[str, Tensor] = {}
    calls: dict[str, Call] = {}
    for place, role in enumerate(ROLES):
        epilogue, num_rows, size = sizes(shape, role)
        rows = num_rows * (2 if epilogue == "swiglu" else 1)
        weights[role] = random_bf16(gpu, (rows, size), 50 * index + place, size**-0.5)
        norms[role] = random_bf16(gpu, (size,), 60 + place)
        x, made = between[role]
        given: dict[str, Any] = {"x": x, "out": made, "weight": weights[role], "norm_weight": norms[role]}
        given |= {"bias": 0, "num_rows": num_rows, "size": size, "eps": EPS}
        constants: dict[str, Any] = dict(specs[role].constants)
        grid = gemv.num_ctas_needed(num_rows, R=constants["R"], WARPS=constants["WARPS"])
        calls[role] = Call(specs[role], given, min(grid, gpu.num_sms * specs[role].ctas_per_sm))

    def product(role: str, x: Tensor) -> Tensor:
        vectors = reference.rms_norm(x, norms[role], EPS) if role in ("qkv", "gate_up") else x
        return (vectors.float() @ weights[role].float().T).bfloat16()

    def expect() -> Tensor:
        qkv.copy_(product("qkv", before))
        seen = attended.expect().bfloat16().view(1, -1)
        middle = before + product("o", seen)
        return middle + product("down", reference.swiglu(product("gate_up", middle)))

    def torch_op() -> Tensor:
        def linear(role: str, x: Tensor) -> Tensor:
            is_normed = role in ("qkv", "gate_up")
            return F.linear(F.rms_norm(x, x.shape[-1:], norms[role], EPS) if is_normed else x, weights[role])

        linear("qkv", before)
        seen = attended.torch_op()
        middle = before + linear("o", seen.reshape(1, -1))
        gate, up = linear("gate_up", middle).chunk(2, dim=-1)
        made: Tensor = middle + linear("down", F.silu(gate) * up)
        return made

    def restore() -> None:
        hidden.copy_(before)

    chain = [calls["qkv"], call, calls["o"], calls["gate_up"], calls["down"]]
    outputs = [hidden, act, call.arguments["out"]]
    return Instance(chain, outputs, expect, lambda expected: worst(hidden, expected), torch_op, restore)
