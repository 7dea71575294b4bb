"""The model during training: Qwen3 in plain torch, with the parameters of Qwen3ForCausalLM of ``transformers``.

The names of the modules give ``state_dict`` the names of the checkpoint, so ``export`` maps nothing. There is no KV
cache, because training runs whole windows. The architecture is that of "Qwen3 Technical Report" (Yang et al., 2025):
RMSNorm before each part, grouped-query attention with a norm on every query and key head, rotary positions, SwiGLU, and
one embedding for input and output.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ferrule_server.kernels.reference import apply_rope, rms_norm, rope_angles

__all__ = ["ModelShape", "TrainingModel"]


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The numbers that determine the parameters; the defaults are those of the bundled model.

    Attributes:
        vocab_size: Entries of the tokenizer.
        hidden_size: Width of the residual stream.
        intermediate_size: Width inside the feed-forward part.
        num_layers: Decoder layers.
        num_heads: Query heads, a multiple of ``num_kv_heads``.
        num_kv_heads: Key and value heads.
        head_dim: Width of one head, even.
        rope_theta: Base of the rotary frequencies.
        norm_eps: Added to the mean square in every RMSNorm.
        max_positions: Longest sequence that the exported configuration allows, in tokens.
    """

    vocab_size: int = 2048
    hidden_size: int = 256
    intermediate_size: int = 640
    num_layers: int = 6
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 64
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-6
    max_positions: int = 2048

    def __post_init__(self) -> None:
        """Refuse shapes that the architecture does not define."""
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads {self.num_heads} is not a multiple of num_kv_heads {self.num_kv_heads}")
        if self.head_dim % 2:
            raise ValueError(f"head_dim {self.head_dim} is odd; rotary positions need pairs")


class TrainingModel(nn.Module):
    """The network. The names in its ``state_dict`` are those of Qwen3ForCausalLM with tied embeddings.

    Args:
        shape: The numbers that determine the parameters.
    """

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.shape = shape
        self.model = _Decoder(shape)
        _initialise(self, shape)

    def forward(self, token_ids: Tensor) -> Tensor:
        """Return the logits of every position.

        Args:
            token_ids: int64 [num_sequences, length], length at least 1.

        Returns:
            float [num_sequences, length, vocab_size]; bfloat16 under autocast, float32 otherwise.
        """
        return F.linear(self.model(token_ids), self.model.embed_tokens.weight)

    def loss(self, windows: Tensor) -> Tensor:
        """Return the mean cross-entropy, in nats per token, of each token of a window after the first.

        Args:
            windows: int64 [num_windows, length + 1].

        Returns:
            float32 scalar.
        """
        logits = self(windows[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1).float(), windows[:, 1:].flatten())

    def num_parameters(self) -> int:
        """Return the number of parameters, with the tied embedding counted once."""
        return sum(parameter.numel() for parameter in self.parameters())


class _Decoder(nn.Module):
    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.shape = shape
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(_Layer(shape) for _ in range(shape.num_layers))
        self.norm = _RMSNorm(shape.hidden_size, shape.norm_eps)

    def forward(self, token_ids: Tensor) -> Tensor:
        hidden = self.embed_tokens(token_ids)
        exponents = torch.arange(0, self.shape.head_dim, 2, device=hidden.device) / self.shape.head_dim
        positions = torch.arange(token_ids.shape[1], device=hidden.device)
        rotation = rope_angles(positions, self.shape.rope_theta**-exponents)
        for layer in self.layers:
            hidden = layer(hidden, rotation)
        normed: Tensor = self.norm(hidden)
        return normed


class _Layer(nn.Module):
    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.input_layernorm = _RMSNorm(shape.hidden_size, shape.norm_eps)
        self.self_attn = _Attention(shape)
        self.post_attention_layernorm = _RMSNorm(shape.hidden_size, shape.norm_eps)
        self.mlp = _FeedForward(shape)

    def forward(self, hidden: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
        hidden = hidden + self.self_attn(self.input_layernorm(hidden), rotation)
        added: Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return added


class _Attention(nn.Module):
    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.head_dim = shape.head_dim
        self.num_queries_per_kv = shape.num_heads // shape.num_kv_heads
        self.q_proj = nn.Linear(shape.hidden_size, shape.num_heads * shape.head_dim, bias=False)
        self.k_proj = nn.Linear(shape.hidden_size, shape.num_kv_heads * shape.head_dim, bias=False)
        self.v_proj = nn.Linear(shape.hidden_size, shape.num_kv_heads * shape.head_dim, bias=False)
        self.o_proj = nn.Linear(shape.num_heads * shape.head_dim, shape.hidden_size, bias=False)
        self.q_norm = _RMSNorm(shape.head_dim, shape.norm_eps)
        self.k_norm = _RMSNorm(shape.head_dim, shape.norm_eps)

    def forward(self, hidden: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
        query = apply_rope(self.q_norm(self._heads(self.q_proj(hidden))), *rotation)
        key = apply_rope(self.k_norm(self._heads(self.k_proj(hidden))), *rotation)
        value = self._heads(self.v_proj(hidden))
        query, key, value = (heads.to(value.dtype).transpose(1, 2) for heads in (query, key, value))
        # The fused CPU kernel requires equal head counts; query head h reads kv head h // num_queries_per_kv.
        key = key.repeat_interleave(self.num_queries_per_kv, dim=1)
        value = value.repeat_interleave(self.num_queries_per_kv, dim=1)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        projected: Tensor = self.o_proj(mixed.transpose(1, 2).flatten(2))
        return projected

    def _heads(self, projected: Tensor) -> Tensor:
        return projected.view(*projected.shape[:2], -1, self.head_dim)


class _FeedForward(nn.Module):
    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        projected: Tensor = self.down_proj(F.silu(self.gate_proj(hidden)) * self.up_proj(hidden))
        return projected


class _RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, hidden: Tensor) -> Tensor:
        return rms_norm(hidden, self.weight, self.eps)


def _initialise(model: nn.Module, shape: ModelShape) -> None:
    """Draw matrices with deviation 0.02; as in GPT-2, those that write to the residual stream get less with depth."""
    residual_std = 0.02 / (2 * shape.num_layers) ** 0.5
    for name, parameter in model.named_parameters():
        if parameter.ndim == 2:
            std = residual_std if name.endswith(("o_proj.weight", "down_proj.weight")) else 0.02
            nn.init.normal_(parameter, std=std)
