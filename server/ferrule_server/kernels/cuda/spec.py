"""A compiled kernel, what is promised of its machine code, and the shapes of the models that kernels are built for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ferrule_server.kernels.cuda.specialise import Constant

__all__ = ["MODEL_SHAPES", "SHARED_LIMITS", "Cubin", "KernelSpec", "LinearShape", "ModelShape", "parameters"]

SHARED_LIMITS = (99 << 10, 227 << 10)
"""Most shared memory of one CTA, in bytes, that kernels are planned for: on 8.0, 8.6, 8.9 and 12.0; on 9.0 and 10.0."""

_SYSTEM_SHARED_BYTES = 1024
"""Shared memory that the system takes of each CTA; all of it is given out in pieces of 128 bytes."""


@dataclass(frozen=True, slots=True)
class LinearShape:
    """One of the linears of a model.

    Attributes:
        num_rows: Values per token that come out.
        size: Values per token that go in.
        epilogue: ``store``, ``residual``, ``swiglu`` or ``logits``; swiglu has twice as many rows of weight.
        has_bias: There is a bias.
        planned_size: What its kernel for vectors is planned for: linears with the same epilogue share one.
    """

    num_rows: int
    size: int
    epilogue: str
    has_bias: bool
    planned_size: int


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The sizes of a model that decide which kernels it needs.

    Attributes:
        hidden_size: Width of the residual stream.
        intermediate_size: Width inside the feed-forward part.
        num_layers: Decoder layers.
        num_heads: Query heads.
        num_kv_heads: Key and value heads, a divisor of ``num_heads``.
        head_dim: Width of one head, 64 or 128.
        vocab_size: Rows of the output head.
        has_qk_norm: Query and key heads are normalised before the rotation (Qwen3).
        has_qkv_bias: The projections of queries, keys and values carry biases.
        has_attention_out_bias: The projection after attention carries a bias.
        has_mlp_bias: The projections of the feed-forward part carry biases.
    """

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    has_qk_norm: bool
    has_qkv_bias: bool = False
    has_attention_out_bias: bool = False
    has_mlp_bias: bool = False

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.num_heads // self.num_kv_heads

    @property
    def qkv_size(self) -> int:
        """Rows of the joint query, key and value projection."""
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_dim

    @property
    def linears(self) -> dict[str, LinearShape]:
        """The linears of a layer, in order."""
        hidden, intermediate, attended = self.hidden_size, self.intermediate_size, self.num_heads * self.head_dim
        wide = max(attended, intermediate)
        return {
            "qkv": LinearShape(self.qkv_size, hidden, "store", self.has_qkv_bias, hidden),
            "attention_out": LinearShape(hidden, attended, "residual", self.has_attention_out_bias, wide),
            "gate_up": LinearShape(intermediate, hidden, "swiglu", self.has_mlp_bias, hidden),
            "down": LinearShape(hidden, intermediate, "residual", self.has_mlp_bias, wide),
        }

    @property
    def head(self) -> LinearShape:
        """The output head."""
        return LinearShape(self.vocab_size, self.hidden_size, "logits", False, self.hidden_size)


MODEL_SHAPES: dict[str, ModelShape] = {
    "Qwen3-0.6B": ModelShape(1024, 3072, 28, 16, 8, 128, 151936, True),
    "Qwen3-1.7B": ModelShape(2048, 6144, 28, 16, 8, 128, 151936, True),
    "Qwen3-4B": ModelShape(2560, 9728, 36, 32, 8, 128, 151936, True),
    "Qwen3-8B": ModelShape(4096, 12288, 36, 32, 8, 128, 151936, True),
    "Llama-3.2-1B": ModelShape(2048, 8192, 16, 32, 8, 64, 128256, False),
}
"""The models whose machine code is checked (their config.json on the Hugging Face hub)."""


@dataclass(frozen=True, slots=True)
class KernelSpec:
    """One kernel with its constants and the resources it is planned with.

    Attributes:
        kernel: A function in the language of :mod:`ferrule_server.kernels.cuda.specialise`.
        constants: Its keyword-only parameters, sorted by name.
        num_threads: Per CTA, a multiple of 32.
        shared_bytes: Dynamic shared memory per CTA at the largest runtime sizes it is planned for.
        ctas_per_sm: CTAs that are planned for one multiprocessor together; bounds registers and shared memory.
        has_mma: The machine code holds tensor-core instructions.
        min_vector_loads: At least so many 16-byte global loads stand in the machine code.
        prefetches: Loads of immutable data stand above ``grid_wait``.
        has_ticket: CTAs meet at a ticket: a fence and a strong atomic stand in the code.
    """

    kernel: Callable[..., None]
    constants: tuple[tuple[str, Constant], ...]
    num_threads: int
    shared_bytes: int
    ctas_per_sm: int = 1
    has_mma: bool = False
    min_vector_loads: int = 1
    prefetches: bool = False
    has_ticket: bool = False

    @property
    def name(self) -> str:
        """Kernel and constants, readable and unique: ``gemv[M=1,R=2]``."""
        return f"{self.kernel.__name__}[{','.join(f'{key}={value}' for key, value in self.constants)}]"

    def ctas_on(self, shared_bytes_per_sm: int) -> int:
        """Return how many CTAs are planned for a multiprocessor with so much shared memory: fewer if it has no room."""
        taken = -(-(self.shared_bytes + _SYSTEM_SHARED_BYTES) // 128) * 128
        return max(1, min(self.ctas_per_sm, shared_bytes_per_sm // taken))


def first_that_fits(variants: Sequence[KernelSpec], limit: int) -> KernelSpec:
    """Return the first variant of which two CTAs fit a multiprocessor, the next kernel beside this one; else the last.

    A CTA of it fits every GPU, because every kernel is built for all of them.

    Args:
        variants: One at least.
        limit: Most shared memory of one CTA of the GPU; it is planned as one of :data:`SHARED_LIMITS`. A multiprocessor
            has 1 KiB more, and each CTA costs it 1 KiB.
    """
    planned = max(one for one in SHARED_LIMITS if one <= limit)
    most = min((planned - 1024) // 2, *SHARED_LIMITS)
    return next((spec for spec in variants if spec.shared_bytes <= most), variants[-1])


@dataclass(frozen=True, slots=True)
class Cubin:
    """The machine code of one kernel for one architecture.

    Attributes:
        name: The entry point.
        code: The ELF image that the driver loads.
        late_code: The same kernel, which lets the next one start only at its end; empty: there is no difference.
    """

    name: str
    code: bytes
    late_code: bytes = b""

    @property
    def late(self) -> Cubin:
        """The kernel as it lets the next one start at its end."""
        return Cubin(self.name, self.late_code or self.code)


def parameters(kernel: Callable[..., None]) -> tuple[tuple[str, str], ...]:
    """Return name and kind (``Address``, ``I32``, ``F32``) of a kernel's runtime parameters, in order."""
    names = kernel.__code__.co_varnames[: kernel.__code__.co_argcount]
    return tuple((name, kernel.__annotations__[name]) for name in names)
