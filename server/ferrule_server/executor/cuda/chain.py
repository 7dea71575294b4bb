"""The launches of a step, from the tokens to the logits and the best token of every row.

A step is a chain of kernels of which each may start while the one before it still runs, but for the first: the kernels
behind it load weights before they wait, and those must be there. Everything that changes from step to step lies in the
buffers, so the same chain serves every step of its number of rows and can be captured as a graph.
"""

from __future__ import annotations

from torch import Tensor

from ferrule_server.executor.cuda.buffers import TABLE_WIDTH
from ferrule_server.executor.cuda.gpu import Launch, Operation
from ferrule_server.executor.cuda.kernel_choice import attention_grid, attention_spec
from ferrule_server.executor.cuda.kernel_set import Arguments
from ferrule_server.executor.cuda.linears import StepParts, linears_for
from ferrule_server.kernels.cuda import embed
from ferrule_server.kernels.cuda.append import ROWS
from ferrule_server.kernels.cuda.work_list import WorkLists


class StepChain:
    """Makes the launches of steps; the pool is adopted.

    Args:
        parts: What they are made from.
        pool: bf16 [num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim], on the GPU, contiguous from the
            third dimension on.

    Attributes:
        block_size: Slots per block.
    """

    def __init__(self, parts: StepParts, pool: Tensor) -> None:
        assert pool[0, 0].is_contiguous(), pool.stride()
        self._parts = parts
        self._pool = pool
        self.block_size = pool.shape[4]
        parts.kernels.gpu.adopt("pool", pool, is_mutable=True)

    def work_lists(self) -> WorkLists:
        """Return what makes the work lists of attention."""
        shape, kernels = self._parts.shape, self._parts.kernels
        return WorkLists(
            num_kv_heads=shape.num_kv_heads,
            rows_per_tile=ROWS // shape.group,
            num_ctas=attention_grid(shape, kernels.gpu.info),
            num_places=len(self._parts.buffers.attention_partials),
        )

    def operations(
        self,
        num_rows: int,
        *,
        stores_logits: bool,
        is_deterministic: bool = False,
        keeps_hidden: bool = False,
        has_outputs: bool = True,
    ) -> list[Operation]:
        """Return what leads from ``input`` to the best token of each row: -1 where a logit is NaN or infinite.

        The tokens are in ``result["greedy"]`` where logits are stored, else in ``result["tokens"]``.

        Args:
            num_rows: Of the step, padded ones included; their KV goes nowhere and their results mean nothing.
            stores_logits: ``logits`` is written.
            is_deterministic: A row's bits do not depend on the rows beside it, nor on how its sequence is cut.
            keeps_hidden: ``normed`` holds the rows behind the final norm.
            has_outputs: False: only KV is wanted; there are neither logits nor tokens.

        Raises:
            GpuError: The GPU refuses one.
            ValueError: ``is_deterministic`` and more than 64 rows.
        """
        linears = linears_for(self._parts, num_rows, is_deterministic=is_deterministic)
        made: list[Operation] = [self._embed(num_rows)]
        for layer in range(self._parts.shape.num_layers):
            made += linears.linear(layer, "qkv")
            made.append(self._attend(layer))
            for name in ("attention_out", "gate_up", "down"):
                made += linears.linear(layer, name)
        if not has_outputs:
            return made
        result = self._parts.buffers.result
        tokens = result["greedy" if stores_logits else "tokens"]
        return made + linears.head(tokens, stores_logits=stores_logits, keeps_hidden=keeps_hidden)

    def _embed(self, num_rows: int) -> Launch:
        buffers, shape = self._parts.buffers, self._parts.shape
        arguments: Arguments = {
            "token_ids": buffers.input["token_ids"],
            "sampled": buffers.result["tokens"],
            "table": self._parts.weights.embedding,
            "hidden": buffers.hidden,
            "num_rows": num_rows,
            "num_sampled": buffers.limits.max_rows,
            "table_rows": shape.vocab_size,
            "size": shape.hidden_size,
        }
        return self._parts.kernels.prepare(embed.spec(), arguments, num_rows, starts_early=False)

    def _attend(self, layer: int) -> Launch:
        parts, buffers, weights = self._parts, self._parts.buffers, self._parts.weights
        arguments: Arguments = {
            "qkv": buffers.qkv,
            "q_norm": weights.layers[layer].get("q_norm", 0),
            "k_norm": weights.layers[layer].get("k_norm", 0),
            "rope": parts.rope,
            "positions": buffers.input["positions"],
            "slot_mapping": buffers.input["slot_mapping"],
            "block_tables": buffers.input["work"],
            "items": buffers.input["work"],
            "tickets": buffers.attention_tickets,
            "partials": buffers.attention_partials,
            "out": buffers.attended,
            "pool": self._pool,
            "block_stride": self._pool.stride(0) * self._pool.itemsize,
            "layer_stride": self._pool.stride(1) * self._pool.itemsize,
            "layer": layer,
            "num_kv_heads": parts.shape.num_kv_heads,
            "max_blocks": TABLE_WIDTH,
            "eps": parts.eps,
            "masks": 0,
        }
        grid = attention_grid(parts.shape, parts.kernels.gpu.info)
        return parts.kernels.prepare(attention_spec(parts.shape, self.block_size), arguments, grid)
