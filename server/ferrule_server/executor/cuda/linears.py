"""The linears of a step, with norms, residuals and SwiGLU: one class per number of rows.

=============  ==========================================================================================
rows           what runs
=============  ==========================================================================================
1 and 2        products with vectors, the norm in front and the rest behind inside of them
3 to 64        products on tensor cores, the rest behind inside of them; a norm in front of two of them
above          cuBLAS through torch; sums and norms in one kernel, SwiGLU in two of torch's
=============  ==========================================================================================

The second also serves fewer rows where bits must not depend on their number.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from ferrule_server.executor.cuda.buffers import DecodeBuffers
from ferrule_server.executor.cuda.gpu import Launch, Operation
from ferrule_server.executor.cuda.kernel_choice import GEMM_ROWS, MAX_GEMM_ROWS, MAX_GEMV_ROWS, gemm_spec, gemv_spec
from ferrule_server.executor.cuda.kernel_set import Arguments, KernelSet
from ferrule_server.kernels.cuda import add_norm, argmax, gemm, gemv, head
from ferrule_server.kernels.cuda.spec import KernelSpec, LinearShape, ModelShape
from ferrule_server.model.tensors import ModelWeights


@dataclass(frozen=True, slots=True)
class LayerLinear:
    """A linear of a layer, with what it reads and writes.

    Attributes:
        shape: Of its weight.
        weight: bf16.
        bias: None: it has none.
        norm: Weight of the norm in front of it; None: there is none.
        x: What it reads, or its norm does.
        out: Where its result ends: ``gated`` behind SwiGLU; added to, not overwritten, where it is the residual stream.
            Steps on cuBLAS put the product elsewhere first (:class:`_Large`).
    """

    shape: LinearShape
    weight: Tensor
    bias: Tensor | None
    norm: Tensor | None
    x: Tensor
    out: Tensor


@dataclass(frozen=True, slots=True)
class StepParts:
    """What the launches of a step are made from.

    Attributes:
        kernels: Prepares launches; all of :func:`~ferrule_server.executor.cuda.kernel_choice.specs_needed`.
        weights: Of the model, bf16, adopted by the GPU of the kernels.
        rope: The table of rotations that goes with them.
        buffers: That steps read and write.
        shape: Of the model.
        eps: Of its norms.
    """

    kernels: KernelSet
    weights: ModelWeights
    rope: Tensor
    buffers: DecodeBuffers
    shape: ModelShape
    eps: float

    def linear(self, layer: int, name: str) -> LayerLinear:
        """Return a linear of a layer by its name: ``qkv``, ``attention_out``, ``gate_up`` or ``down``."""
        buffers, weights = self.buffers, self.weights.layers[layer]
        shape, weight, bias = self.shape.linears[name], weights[name], weights.get(f"{name}_bias")
        match name:
            case "qkv":
                return LayerLinear(shape, weight, bias, weights["attention_norm"], buffers.hidden, buffers.qkv)
            case "attention_out":
                return LayerLinear(shape, weight, bias, None, buffers.attended, buffers.hidden)
            case "gate_up":
                return LayerLinear(shape, weight, bias, weights["mlp_norm"], buffers.hidden, buffers.gated)
        assert name == "down", name
        return LayerLinear(shape, weight, bias, None, buffers.gated, buffers.hidden)

    def launch(self, spec: KernelSpec, arguments: Arguments, most_ctas: int) -> Launch:
        """Return a launch of as many CTAs as find work, in one wave at most."""
        return self.kernels.prepare(spec, arguments, self.grid(spec, most_ctas))

    def grid(self, spec: KernelSpec, most_ctas: int) -> int:
        """Return how many CTAs :meth:`launch` takes."""
        return min(most_ctas, self.kernels.gpu.info.wave(spec))

    def norm(self, weight: Tensor, num_rows: int, delta: Tensor | None = None) -> Launch:
        """Return the launch that puts the norm of ``hidden`` into ``normed``, behind the addition of a delta."""
        hidden, normed = self.buffers.hidden, self.buffers.normed
        arguments: Arguments = {
            "hidden": hidden,
            "delta": 0 if delta is None else delta,
            "norm_weight": weight,
            "normed": normed,
            "num_rows": num_rows,
            "size": self.shape.hidden_size,
            "eps": self.eps,
        }
        return self.launch(add_norm.spec(self.shape.hidden_size, ADD=delta is not None), arguments, num_rows)

    def best_tokens(self, tokens: Tensor, num_rows: int) -> Launch:
        """Return the launch that finds the best token of each row of ``logits``."""
        buffers, vocab = self.buffers, self.shape.vocab_size
        arguments: Arguments = {
            "logits": buffers.logits,
            "tokens": tokens,
            "partials": buffers.argmax_partials,
            "tickets": buffers.argmax_tickets,
            "num_rows": num_rows,
            "vocab_size": vocab,
        }
        return self.launch(argmax.spec(), arguments, argmax.num_ctas_needed(num_rows, vocab))


class Linears(Protocol):
    """The linears of a step of some rows: ``hidden`` is the residual stream between them."""

    def linear(self, layer: int, name: str) -> list[Operation]:
        """Return what runs a linear of a layer (:meth:`StepParts.linear`), with its norm and what follows it."""

    def head(self, tokens: Tensor, *, stores_logits: bool, keeps_hidden: bool) -> list[Operation]:
        """Return what leads from ``hidden`` to the best token of every row.

        Args:
            tokens: int32 [rows], written.
            stores_logits: ``logits`` must be written too.
            keeps_hidden: ``normed`` must hold the rows behind the final norm.
        """


def linears_for(parts: StepParts, num_rows: int, *, is_deterministic: bool) -> Linears:
    """Return the linears of steps of so many rows.

    Args:
        parts: Of every step.
        num_rows: Of the step.
        is_deterministic: A row's bits must not depend on ``num_rows``.

    Raises:
        ValueError: More than 64 rows, of which bits depend on their number.
    """
    if is_deterministic and num_rows > MAX_GEMM_ROWS:
        raise ValueError(f"{num_rows} rows; bits are the same for any number up to {MAX_GEMM_ROWS}")
    if num_rows <= MAX_GEMV_ROWS and not is_deterministic:
        return _Vectors(parts, num_rows)
    most = MAX_GEMM_ROWS if is_deterministic else GEMM_ROWS[parts.kernels.gpu.info.capability[0]]
    return _Tiles(parts, num_rows) if num_rows <= most else _Large(parts, num_rows)


@dataclass(frozen=True, slots=True)
class _Vectors:
    """One or two rows."""

    parts: StepParts
    num_rows: int

    def linear(self, layer: int, name: str) -> list[Operation]:
        parts, linear = self.parts, self.parts.linear(layer, name)
        spec = gemv_spec(linear.shape, self.num_rows, parts.kernels.gpu.info.shared_bytes_per_cta)
        arguments: Arguments = {
            "x": linear.x,
            "norm_weight": 0 if linear.norm is None else linear.norm,
            "weight": linear.weight,
            "bias": 0 if linear.bias is None else linear.bias,
            "out": linear.out,
            "num_rows": linear.shape.num_rows,
            "size": linear.shape.size,
            "eps": parts.eps,
        }
        return [parts.launch(spec, arguments, gemv.num_ctas_needed(linear.shape.num_rows, dict(spec.constants)))]

    def head(self, tokens: Tensor, *, stores_logits: bool, keeps_hidden: bool) -> list[Operation]:
        parts, buffers = self.parts, self.parts.buffers
        spec = head.planned(parts.shape, M=self.num_rows, limit=parts.kernels.gpu.info.shared_bytes_per_cta)
        arguments: Arguments = {
            "hidden": buffers.hidden,
            "norm_weight": parts.weights.final_norm,
            "weight": parts.weights.head,
            "logits": buffers.logits if stores_logits else 0,
            "tokens": tokens,
            "partials": buffers.head_partials,
            "ticket": buffers.head_ticket,
            "vocab_size": parts.shape.vocab_size,
            "size": parts.shape.hidden_size,
            "eps": parts.eps,
        }
        needed = gemv.num_ctas_needed(parts.shape.vocab_size, dict(spec.constants))
        grid = parts.grid(spec, needed)
        room = buffers.head_partials.numel()
        assert grid * self.num_rows <= room, f"{grid} CTAs of the output head, {self.num_rows} rows, room for {room}"
        made: list[Operation] = [parts.launch(spec, arguments, needed)]
        return [*made, parts.norm(parts.weights.final_norm, self.num_rows)] if keeps_hidden else made


@dataclass(frozen=True, slots=True)
class _Tiles:
    """Up to 64 rows."""

    parts: StepParts
    num_rows: int

    def linear(self, layer: int, name: str) -> list[Operation]:
        parts, linear = self.parts, self.parts.linear(layer, name)
        norms = [] if linear.norm is None else [parts.norm(linear.norm, self.num_rows)]
        x = linear.x if linear.norm is None else parts.buffers.normed
        return [*norms, self._product(linear.shape, x, linear.weight, linear.bias, linear.out)]

    def head(self, tokens: Tensor, *, stores_logits: bool, keeps_hidden: bool) -> list[Operation]:
        del stores_logits, keeps_hidden  # both happen anyway
        parts, shape = self.parts, self.parts.shape
        return [
            parts.norm(parts.weights.final_norm, self.num_rows),
            self._product(shape.head, parts.buffers.normed, parts.weights.head, None, parts.buffers.logits),
            parts.best_tokens(tokens, self.num_rows),
        ]

    def _product(self, linear: LinearShape, x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> Launch:
        part_size, part_bits = gemm.split(linear)
        arguments: Arguments = {
            "x": x,
            "weight": weight,
            "bias": 0 if bias is None else bias,
            "out": out,
            "partials": self.parts.buffers.gemm_partials,
            "tickets": self.parts.buffers.gemm_tickets,
            "num_tokens": self.num_rows,
            "num_rows": linear.num_rows,
            "size": linear.size,
            "part_size": part_size,
            "part_bits": part_bits,
        }
        return self.parts.launch(gemm_spec(linear, self.num_rows), arguments, gemm.num_ctas_needed(linear))


@dataclass(frozen=True, slots=True)
class _Large:
    """More than 64 rows: what a linear gives the residual stream lies in ``normed`` until the next norm adds it."""

    parts: StepParts
    num_rows: int

    def linear(self, layer: int, name: str) -> list[Operation]:
        buffers, linear, num_rows = self.parts.buffers, self.parts.linear(layer, name), self.num_rows
        made: list[Operation] = []
        x, product = linear.x, linear.out
        if linear.norm is not None:
            is_first = layer == 0 and name == "qkv"  # no linear has given the residual stream anything yet
            made.append(self.parts.norm(linear.norm, num_rows, None if is_first else buffers.normed))
            x = buffers.normed
        if linear.out is buffers.hidden:
            product = buffers.normed  # the next norm adds it
        elif name == "gate_up":
            product = buffers.gate_up  # SwiGLU leads from it to ``out``
        made.append(partial(linear_out, x[:num_rows], linear.weight, product[:num_rows], linear.bias))
        if name == "gate_up":
            made.append(partial(_swiglu_out, product[:num_rows], linear.out[:num_rows]))
        return made

    def head(self, tokens: Tensor, *, stores_logits: bool, keeps_hidden: bool) -> list[Operation]:
        del stores_logits, keeps_hidden  # both happen anyway
        parts, buffers, num_rows = self.parts, self.parts.buffers, self.num_rows
        vocab = parts.shape.vocab_size
        # Nothing is in the shaped logits yet, so they hold the bf16 ones.
        rounded = buffers.shaped.view(torch.bfloat16).view(-1)[: num_rows * vocab].view(num_rows, vocab)
        return [
            parts.norm(parts.weights.final_norm, num_rows, buffers.normed),
            partial(_logits_out, buffers.normed[:num_rows], parts.weights.head, rounded, buffers.logits[:num_rows]),
            parts.best_tokens(tokens, num_rows),
        ]


@torch.inference_mode()
def linear_out(x: Tensor, weight: Tensor, out: Tensor, bias: Tensor | None = None) -> None:
    """Put ``x @ weight.T + bias`` into ``out``, whatever mode its tensors were made in; no result is allocated.

    The order of the sums is that of cuBLAS, which may change with the number of rows.

    Args:
        x: bf16 [rows, in_features].
        weight: bf16 [out_features, in_features].
        out: bf16 [rows, out_features], contiguous, written.
        bias: bf16 [out_features], added before rounding.
    """
    if bias is None:
        torch.matmul(x, weight.t(), out=out)
    else:
        torch.addmm(bias, x, weight.t(), out=out)


@torch.inference_mode()
def _swiglu_out(gate_up: Tensor, out: Tensor) -> None:
    """Put ``silu(gate) * up`` into ``out``; the gate is overwritten."""
    gate, up = gate_up.chunk(2, dim=-1)
    F.silu(gate, inplace=True)
    torch.mul(gate, up, out=out)


@torch.inference_mode()
def _logits_out(x: Tensor, weight: Tensor, rounded: Tensor, logits: Tensor) -> None:
    """Put the output head's product, rounded to bf16, into ``logits`` as float32."""
    linear_out(x, weight, rounded)
    logits.copy_(rounded)
