"""Whole decode steps: every kernel of a step in one chain of early starts, against the decoder in torch.

What single kernels cannot show: that each reads what the one before it wrote, in the same layout and rounding, that
K and V reach the pool, and that no kernel reads or writes anything mutable before it may.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor

from ferrule_server.kernels.cuda import add_norm, argmax, attention, embed, gemm, gemv, head
from ferrule_server.kernels.cuda.append import rope_table
from ferrule_server.kernels.cuda.spec import KernelSpec, LinearShape, ModelShape
from ferrule_server.kernels.cuda.work_list import WorkList, make_work_list
from ferrule_server.model.attention import PlainAttention, StepArrays
from ferrule_server.model.config import ModelConfig
from ferrule_server.model.config_reader import parse_config
from ferrule_server.model.decoder import Decoder
from ferrule_server.model.rope import inverse_frequencies
from ferrule_server.model.tensors import LayerWeights, ModelWeights
from tests.kernels.cuda.padded_pool import PaddedPool
from tools.cuda_simulator import Launch, Memory, run

NUM_LAYERS, HIDDEN, INTERMEDIATE, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, VOCAB = 2, 136, 200, 4, 2, 64, 101
BLOCK_SIZE, NUM_BLOCKS, MAX_CONTEXT, NUM_CTAS = 16, 9, 256, 3
SHAPE = ModelShape(HIDDEN, INTERMEDIATE, NUM_LAYERS, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, VOCAB, True)
QKV = SHAPE.qkv_size


@dataclass(frozen=True)
class Step:
    """Rows of two sequences at most; the KV before them is in the pool already."""

    num_rows: tuple[int, ...]
    kv_lens: tuple[int, ...]

    @property
    def arrays(self) -> dict[str, np.ndarray[tuple[int, ...], np.dtype[np.int32]]]:
        """The arrays of a StepBatch."""
        begins = np.concatenate(([0], np.cumsum(self.num_rows))).astype(np.int32)
        tables = np.array([[3, 5, 1, 7], [8, 2, 6, 4]], np.int32)[: len(self.kv_lens)]
        positions = np.concatenate(
            [np.arange(length - rows, length) for rows, length in zip(self.num_rows, self.kv_lens, strict=True)]
        ).astype(np.int32)
        seq = np.repeat(np.arange(len(self.num_rows)), self.num_rows)
        slots = tables[seq, positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE
        return {
            "positions": positions,
            "slot_mapping": slots.astype(np.int32),
            "cu_seqlens_q": begins,
            "kv_lens": np.array(self.kv_lens, np.int32),
            "block_tables": tables,
        }


def _config() -> ModelConfig:
    return parse_config(
        {
            "architectures": ["Qwen3ForCausalLM"],
            "model_type": "qwen3",
            "hidden_size": HIDDEN,
            "intermediate_size": INTERMEDIATE,
            "num_hidden_layers": NUM_LAYERS,
            "num_attention_heads": NUM_HEADS,
            "num_key_value_heads": NUM_KV_HEADS,
            "head_dim": HEAD_DIM,
            "vocab_size": VOCAB,
            "max_position_embeddings": MAX_CONTEXT,
            "rms_norm_eps": 1e-6,
            "rope_theta": 10000.0,
            "hidden_act": "silu",
            "tie_word_embeddings": False,
        },
        {},
    )


def _weights() -> ModelWeights:
    torch.manual_seed(1)

    def matrix(rows: int, size: int) -> Tensor:
        return torch.randn(rows, size).mul(size**-0.5).bfloat16()

    def norm(size: int) -> Tensor:
        return (1 + 0.2 * torch.randn(size)).bfloat16()

    layers = [
        LayerWeights(
            attention_norm=norm(HIDDEN),
            qkv=matrix(QKV, HIDDEN),
            attention_out=matrix(HIDDEN, NUM_HEADS * HEAD_DIM),
            mlp_norm=norm(HIDDEN),
            gate_up=matrix(2 * INTERMEDIATE, HIDDEN),
            down=matrix(HIDDEN, INTERMEDIATE),
            q_norm=norm(HEAD_DIM),
            k_norm=norm(HEAD_DIM),
        )
        for _ in range(NUM_LAYERS)
    ]
    return ModelWeights(matrix(VOCAB, HIDDEN), matrix(VOCAB, HIDDEN), norm(HIDDEN), layers)


def _bits(tensor: Tensor) -> np.ndarray[tuple[int, ...], np.dtype[np.uint16]]:
    bits: np.ndarray[tuple[int, ...], np.dtype[np.uint16]] = tensor.contiguous().view(torch.uint16).numpy()
    return bits


class Chain:
    """Places a model and a step in simulated memory and lists the launches of the step."""

    def __init__(self, weights: ModelWeights, config: ModelConfig, step: Step, token_ids: list[int], pool: Tensor):
        self.memory = Memory()
        self.launches: list[Launch] = []
        self._rows = len(token_ids)
        self._pool = PaddedPool(NUM_BLOCKS, NUM_LAYERS, NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM)
        self._pool_address = self._pool.put(self.memory, _bits(pool))
        self._place_step(step, token_ids)
        self._place_weights(weights, config)
        self._place_buffers()

    @property
    def pool(self) -> Tensor:
        """The pool as it is now."""
        return torch.from_numpy(self._pool.get(self.memory).view(np.int16)).view(torch.bfloat16)

    @property
    def logits(self) -> Tensor:
        """What the output head gave."""
        return torch.from_numpy(self.memory.get("logits"))

    @property
    def tokens(self) -> list[int]:
        """The greedy tokens."""
        return [int(token) for token in self.memory.get("tokens")]

    def _place_step(self, step: Step, token_ids: list[int]) -> None:
        self._arrays = step.arrays
        put = self.memory.put
        self._a = {name: put(name, values, mutable=True) for name, values in self._arrays.items()}
        # The last token is one that the step before chose.
        self._a["sampled"] = put("sampled", np.array(token_ids[::-1], np.int32), mutable=True)
        self._a["token_ids"] = put("token_ids", np.array([*token_ids[:-1], -2], np.int32), mutable=True)
        self._num_new = np.array(step.num_rows, np.int32)

    def _place_weights(self, weights: ModelWeights, config: ModelConfig) -> None:
        put, a = self.memory.put, self._a
        a["rope"] = put(
            "rope", rope_table(inverse_frequencies(config.layers[0].rope, config.head_dim), MAX_CONTEXT).numpy()
        )
        for name in ("embedding", "head", "final_norm"):
            a[name] = put(name, _bits(getattr(weights, name)))
        names = ("attention_norm", "qkv", "q_norm", "k_norm", "attention_out", "mlp_norm", "gate_up", "down")
        for index, layer in enumerate(weights.layers):
            for name in names:
                a[f"{name}{index}"] = put(f"{name}{index}", _bits(getattr(layer, name)))

    def _place_buffers(self) -> None:
        rows = self._rows
        empty, a = self.memory.empty, self._a
        widths = {"hidden": HIDDEN, "normed": HIDDEN, "qkv": QKV, "attended": NUM_HEADS * HEAD_DIM, "act": INTERMEDIATE}
        for name, width in widths.items():
            a[name] = empty(name, (rows, width), np.uint16)
        a["logits"] = empty("logits", (rows, VOCAB), np.float32)
        a["tokens"] = empty("tokens", (rows,), np.int32)
        a["head_partials"] = empty("head_partials", (256, 2), np.uint64)
        a["gemm_partials"] = empty("gemm_partials", gemm.scratch(SHAPE)[0], np.float32)
        a["gemm_tickets"] = self.memory.put("gemm_tickets", np.zeros(gemm.scratch(SHAPE)[1], np.int32), mutable=True)
        a["partials"] = empty("partials", (1 << 16,), np.float32)
        a["tickets"] = self.memory.put("tickets", np.zeros(64, np.int32), mutable=True)
        a["head_ticket"] = self.memory.put("head_ticket", np.zeros(64, np.int32), mutable=True)

    def launch(self, spec: KernelSpec, *args: float, grid: int = NUM_CTAS) -> None:
        """Add a launch."""
        constants = dict(spec.constants)
        self.launches.append(Launch(spec.kernel, constants, args, grid, spec.num_threads, spec.shared_bytes))

    def begin(self) -> None:
        """Add the gather of embeddings."""
        a = self._a
        self.launch(
            embed.spec(),
            *(a["token_ids"], a["sampled"], a["embedding"], a["hidden"]),
            *(self._rows, self._rows, VOCAB, HIDDEN),
        )

    def work_list(self) -> WorkList:
        """Write the work list of the step and return it."""
        work = make_work_list(
            cu_seqlens_q=self._arrays["cu_seqlens_q"],
            kv_lens=self._arrays["kv_lens"],
            num_new=self._num_new,
            positions=self._arrays["positions"],
            num_kv_heads=NUM_KV_HEADS,
            rows_per_tile=16 // SHAPE.group,
            num_ctas=NUM_CTAS,
        )
        self._a["items"] = self.memory.put("items", work.items, mutable=True)
        return work

    def attend(self, layer: int) -> None:
        """Add attention; the work list is written."""
        a = self._a
        self.launch(
            attention.spec(SHAPE),
            *(a["qkv"], a[f"q_norm{layer}"], a[f"k_norm{layer}"], a["rope"], a["positions"], a["slot_mapping"]),
            *(a["block_tables"], a["items"], a["tickets"], a["partials"], a["attended"], self._pool_address),
            *(self._pool.block_stride, self._pool.layer_stride, layer, NUM_KV_HEADS, 4, 1e-6, 0),
        )

    def gemv(self, x: str, norm: str, weight: str, out: str, *, num_rows: int, size: int, epilogue: str) -> None:
        """Add a product with one or two rows."""
        a = self._a
        spec = gemv.spec(size, M=self._rows, NORM=bool(norm), EPILOGUE=epilogue, WARPS=2, R=1, U=2)
        norm_weight = a[norm] if norm else 0
        self.launch(spec, a[x], norm_weight, a[weight], 0, a[out], num_rows, size, 1e-6)

    def gemm(self, x: str, weight: str, out: str, *, num_rows: int, size: int, epilogue: str) -> None:
        """Add a product with more rows."""
        a = self._a
        spec = gemm.spec(TILES=gemm.tiles_for(self._rows), EPILOGUE=epilogue)
        split = gemm.split(LinearShape(num_rows, size, epilogue, False, size))
        sizes = (self._rows, num_rows, size, *split)
        self.launch(spec, a[x], a[weight], 0, a[out], a["gemm_partials"], a["gemm_tickets"], *sizes)

    def add_norm(self, norm: str) -> None:
        """Add a norm of the residual stream."""
        a = self._a
        self.launch(
            add_norm.spec(HIDDEN, ADD=False, WARPS=2), a["hidden"], 0, a[norm], a["normed"], self._rows, HIDDEN, 1e-6
        )


def _small_chain(chain: Chain, num_rows: int) -> None:
    """Add the step of one or two rows: five kernels per layer."""
    chain.begin()
    chain.work_list()
    for i in range(NUM_LAYERS):
        chain.gemv("hidden", f"attention_norm{i}", f"qkv{i}", "qkv", num_rows=QKV, size=HIDDEN, epilogue="store")
        chain.attend(i)
        chain.gemv(
            "attended",
            "",
            f"attention_out{i}",
            "hidden",
            num_rows=HIDDEN,
            size=NUM_HEADS * HEAD_DIM,
            epilogue="residual",
        )
        chain.gemv(
            "hidden",
            f"mlp_norm{i}",
            f"gate_up{i}",
            "act",
            num_rows=INTERMEDIATE,
            size=HIDDEN,
            epilogue="swiglu",
        )
        chain.gemv("act", "", f"down{i}", "hidden", num_rows=HIDDEN, size=INTERMEDIATE, epilogue="residual")
    a = chain._a
    chain.launch(
        head.spec(HIDDEN, M=num_rows, R=1, U=2, WARPS=2),
        *(a["hidden"], a["final_norm"], a["head"], a["logits"], a["tokens"], a["head_partials"], a["head_ticket"]),
        *(VOCAB, HIDDEN, 1e-6),
    )


def _large_chain(chain: Chain, num_rows: int) -> None:
    """Add the step of three rows and more: tensor cores, and norms of their own."""
    chain.begin()
    chain.work_list()
    for i in range(NUM_LAYERS):
        chain.add_norm(f"attention_norm{i}")
        chain.gemm("normed", f"qkv{i}", "qkv", num_rows=QKV, size=HIDDEN, epilogue="store")
        chain.attend(i)
        chain.gemm(
            "attended", f"attention_out{i}", "hidden", num_rows=HIDDEN, size=NUM_HEADS * HEAD_DIM, epilogue="residual"
        )
        chain.add_norm(f"mlp_norm{i}")
        chain.gemm("normed", f"gate_up{i}", "act", num_rows=INTERMEDIATE, size=HIDDEN, epilogue="swiglu")
        chain.gemm("act", f"down{i}", "hidden", num_rows=HIDDEN, size=INTERMEDIATE, epilogue="residual")
    chain.add_norm("final_norm")
    chain.gemm("normed", "head", "logits", num_rows=VOCAB, size=HIDDEN, epilogue="logits")
    a = chain._a
    chain.launch(
        argmax.spec(WARPS=2, SLICE=512),
        *(a["logits"], a["tokens"], a["head_partials"], a["head_ticket"], num_rows, VOCAB),
    )


def _expected(weights: ModelWeights, config: ModelConfig, step: Step, token_ids: list[int], pool: Tensor) -> Tensor:
    """Run the step in torch, plainly; the pool is changed. Returns float32 [rows, vocab]."""
    decoder = Decoder(config, copy.deepcopy(weights), device=torch.device("cpu"), is_plain=True)
    arrays = StepArrays(**step.arrays)
    with torch.inference_mode():
        hidden = decoder.forward(
            torch.tensor(token_ids),
            torch.tensor(step.arrays["positions"]),
            PlainAttention(pool, arrays),
            torch.arange(len(token_ids)),
        )
        logits: Tensor = decoder.head(hidden)
    return logits


def _filled_pool() -> Tensor:
    torch.manual_seed(2)
    return torch.randn(NUM_BLOCKS, NUM_LAYERS, 2, NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM).bfloat16()


@pytest.mark.parametrize(
    ("step", "is_small"),
    [
        pytest.param(Step((1,), (37,)), True, id="one row"),
        pytest.param(Step((1, 1), (18, 33)), True, id="two sequences"),
        pytest.param(Step((5, 6), (40, 17)), False, id="two verifies"),
    ],
)
def test_a_chain_of_kernels_is_a_step_of_the_decoder(step: Step, is_small: bool) -> None:
    """Logits, greedy tokens and the pool are those of the decoder, up to the rounding of bfloat16."""
    config, weights = _config(), _weights()
    token_ids = [(37 * i + 11) % VOCAB for i in range(sum(step.num_rows))]
    pool = _filled_pool()
    chain = Chain(weights, config, step, token_ids, pool)
    (_small_chain if is_small else _large_chain)(chain, len(token_ids))
    expected = _expected(weights, config, step, token_ids, pool)

    run(chain.memory, chain.launches, seed=3)

    # A step of bfloat16 at logits of 2 to 4 is 0.016; softmax weights are rounded to bfloat16 too.
    torch.testing.assert_close(chain.logits, expected, rtol=0, atol=0.06)
    assert chain.tokens == chain.logits.argmax(-1).tolist()
    top2 = expected.topk(2).values
    for row in range(len(token_ids)):
        if top2[row, 0] - top2[row, 1] > 0.12:
            assert chain.tokens[row] == expected[row].argmax()
    torch.testing.assert_close(chain.pool.float(), pool.float(), rtol=0.02, atol=0.03)
    is_written = chain.pool != _filled_pool()
    slots = step.arrays["slot_mapping"]
    assert sorted({(int(i[0]), int(i[4])) for i in is_written.nonzero()}) == sorted(
        (int(slot) // BLOCK_SIZE, int(slot) % BLOCK_SIZE) for slot in slots
    )
