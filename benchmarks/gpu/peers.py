"""What others make of the same tensors on the same GPU: transformers, and a plain model compiled or in one graph."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.gpu import models
from benchmarks.gpu.plain_model import PlainModel
from benchmarks.gpu.timing import synchronize
from ferrule_server.executor.base import Float32Array
from ferrule_server.model.tensors import ModelWeights

_PREFILL_TOKENS = 512
_NUM_WARM_STEPS = 4

Forward = Callable[[Tensor, Tensor], Tensor]
"""Appends int64 [batch, tokens] at positions int64 [tokens] and returns logits [batch, vocab_size]."""


class PeerLeftOut(Exception):
    """A peer cannot run here; the message says why."""


class Peer(ABC):
    """Decodes with a static cache, the token of each step fed to the next on the device.

    Args:
        model: Name of the shape.
        weights: Shared with every other arm.
    """

    name = "peer"

    def __init__(self, model: str, weights: ModelWeights) -> None:
        self.model = model
        self.config = models.config_of(model)
        self.weights = weights
        self.device = weights.embedding.device
        self.context = 0
        self.warm_s = 0.0
        self._token = torch.zeros(0)
        self._position = torch.zeros(0)
        self._forward: Forward | None = None

    def prepare(self, batch: int, context: int, num_steps: int) -> None:
        """Fill the cache with the very prompt that ours has, then compile or capture the step.

        Raises:
            PeerLeftOut: It cannot run here.
        """
        self.close()
        self.context = context
        with torch.no_grad():
            self._forward = self.build(batch, context + num_steps)
            prompt, first = prompts(self.config.vocab_size, batch, context)
            self._prefill(prompt.to(self.device))
            self._token = first.to(self.device).unsqueeze(1)
            self._position = torch.tensor([context], device=self.device)
            began = time.perf_counter()
            self.warm_up()
            synchronize(self.device)
            self.warm_s = time.perf_counter() - began

    def decode(self, num_steps: int) -> None:
        """Decode from the context on."""
        with torch.no_grad():
            self.rewind()
            token = self._token.clone()
            for _ in range(num_steps):
                token = self.step(token)
        synchronize(self.device)

    def first_logits(self) -> Float32Array:
        """Return the logits behind the context of the first sequence."""
        assert self._forward is not None
        with torch.no_grad():
            self.rewind()
            logits: Float32Array = self._forward(self._token, self._position)[0].float().cpu().numpy()
        return logits

    @abstractmethod
    def build(self, batch: int, length: int) -> Forward:
        """Return the model's forward, caches allocated."""

    def warm_up(self) -> None:
        """Run the step until it is compiled or captured."""
        self.decode(_NUM_WARM_STEPS)

    def rewind(self) -> None:
        """Go back to the context: what was written beyond it is overwritten."""
        self._position.fill_(self.context)

    @abstractmethod
    def step(self, token: Tensor) -> Tensor:
        """Append one token to each sequence, int64 [batch, 1], and return the next ones."""

    def close(self) -> None:
        """Give caches and graphs back."""
        self._forward = None

    def _next_step(self, compiled_step: Callable[..., Tensor], token: Tensor) -> Tensor:
        """Run a compiled step; what it returns lies in memory that the next one overwrites."""
        if self.device.type == "cuda":
            torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]
        chosen = compiled_step(token, self._position).clone()
        self._position.add_(1)
        return chosen

    def _prefill(self, prompt: Tensor) -> None:
        assert self._forward is not None
        for begin in range(0, prompt.shape[1], _PREFILL_TOKENS):
            chunk = prompt[:, begin : begin + _PREFILL_TOKENS]
            self._forward(chunk, torch.arange(begin, begin + chunk.shape[1], device=self.device))


def prompts(vocab_size: int, batch: int, context: int) -> tuple[Tensor, Tensor]:
    """Return the prompt of every sequence, int64 [batch, context], and the token behind it, int64 [batch].

    The same as ours: one prompt for all, other tokens behind it.
    """
    prompt = np.random.default_rng(3).integers(0, vocab_size, context).astype(np.int32)
    first = np.random.default_rng(5).integers(0, vocab_size, batch).astype(np.int32)
    return torch.from_numpy(prompt).long().expand(batch, -1), torch.from_numpy(first).long()


class PlainPeer(Peer):
    """The plain model as it is: one launch of the host per operation; what a dry run executes."""

    name = "plain torch"

    def build(self, batch: int, length: int) -> Forward:
        """Return the model's forward."""
        self._plain = PlainModel(self.config, self.weights, batch, length)
        return self._plain

    def step(self, token: Tensor) -> Tensor:
        """Append one token to each sequence."""
        assert self._forward is not None
        chosen = self._forward(token, self._position).argmax(-1, keepdim=True)
        self._position.add_(1)
        return chosen


class GraphPeer(PlainPeer):
    """The plain model's operations in one CUDA graph, captured by hand: library kernels under our conditions."""

    name = "torch in a graph"

    def warm_up(self) -> None:
        """Capture a step over its own token."""
        super().decode(_NUM_WARM_STEPS)
        if self.device.type != "cuda":
            return
        self._static = self._token.clone()
        stream: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self._once()
        torch.cuda.current_stream().wait_stream(stream)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, capture_error_mode="thread_local"):
            self._once()

    def decode(self, num_steps: int) -> None:
        """Replay."""
        if self.device.type != "cuda" or not hasattr(self, "_graph"):
            super().decode(num_steps)
            return
        self.rewind()
        self._static.copy_(self._token)
        for _ in range(num_steps):
            self._graph.replay()
        synchronize(self.device)

    def close(self) -> None:
        """Give caches and graph back."""
        super().close()
        for name in ("_graph", "_static", "_plain"):
            self.__dict__.pop(name, None)

    def _once(self) -> None:
        self._static.copy_(PlainPeer.step(self, self._static))


class CompiledPeer(PlainPeer):
    """The plain model compiled with all that inductor offers; its graphs are torch's own.

    Args:
        mode: Of ``torch.compile``; None on a CPU, where the step is only traced, which finds breaks in the graph.
    """

    name = "gpt-fast style"

    def __init__(self, model: str, weights: ModelWeights, mode: str | None = "max-autotune") -> None:
        super().__init__(model, weights)
        self._mode = mode

    def build(self, batch: int, length: int) -> Forward:
        """Return the model's forward as it is, for the prompt; the step is compiled apart."""
        forward = super().build(batch, length)
        for name, buffer in self._plain.named_buffers():
            if name.endswith(("keys", "values")):  # written in place: a graph needs them where they are
                torch._dynamo.mark_static_address(buffer)  # noqa: SLF001
        self._compiled = compiled(self._next, self._mode)
        return forward

    def step(self, token: Tensor) -> Tensor:
        """Append one token to each sequence."""
        return self._next_step(self._compiled, token)

    def _next(self, token: Tensor, position: Tensor) -> Tensor:
        logits: Tensor = self._plain(token, position)
        return logits.argmax(-1, keepdim=True)


def compiled(function: Callable[..., Tensor], mode: str | None) -> Callable[..., Tensor]:
    """Return a function compiled without breaks; without a mode, traced and run as it is."""
    torch.compiler.reset()
    if mode is None:
        return torch.compile(function, fullgraph=True, dynamic=False, backend="eager")
    if mode == "max-autotune":
        inductor: Any = torch._inductor.config  # noqa: SLF001  (where gpt-fast sets it too)
        inductor.coordinate_descent_tuning = True
    return torch.compile(function, fullgraph=True, dynamic=False, mode=mode)


class StaticPeer(Peer):
    """transformers with a static cache; the decode step compiled with ``reduce-overhead``, as its manual advises.

    Args:
        mode: As for :class:`CompiledPeer`.
    """

    name = "transformers static"

    def __init__(self, model: str, weights: ModelWeights, mode: str | None = "reduce-overhead") -> None:
        super().__init__(model, weights)
        self._mode = mode
        self._model = transformers_model(model, weights)

    def build(self, batch: int, length: int) -> Forward:  # noqa: ARG002  (the cache takes it from the prompt)
        """Return a forward over a new cache."""
        from transformers import StaticCache

        self._cache: Any = StaticCache(config=self._model.config, max_cache_len=length)
        self._compiled = compiled(self._next, self._mode)
        return self._run

    def warm_up(self) -> None:
        """Check that the cache can be rewound, then compile."""
        if not all(hasattr(layer, "cumulative_length") for layer in self._cache.layers):
            raise PeerLeftOut("this version of transformers keeps the length of a static cache elsewhere")
        super().warm_up()

    def rewind(self) -> None:
        """Go back to the context."""
        super().rewind()
        for layer in self._cache.layers:
            layer.cumulative_length.fill_(self.context)

    def step(self, token: Tensor) -> Tensor:
        """Append one token to each sequence."""
        return self._next_step(self._compiled, token)

    def close(self) -> None:
        """Give the cache back."""
        super().close()
        self.__dict__.pop("_cache", None)

    def _run(self, token_ids: Tensor, positions: Tensor) -> Tensor:
        done = self._model(
            token_ids,
            position_ids=positions.unsqueeze(0),
            past_key_values=self._cache,
            use_cache=True,
            logits_to_keep=1,
        )
        logits: Tensor = done.logits[:, -1]
        return logits

    def _next(self, token: Tensor, position: Tensor) -> Tensor:
        return self._run(token, position).argmax(-1, keepdim=True)


def transformers_model(name: str, weights: ModelWeights) -> Any:
    """Return transformers' model over the shared weights; nothing is copied.

    Raises:
        PeerLeftOut: transformers is not installed.
    """
    try:
        import transformers
    except ImportError as error:
        raise PeerLeftOut(f"transformers is not installed ({error})") from error
    config = models.config_of(name)
    prefix = "Qwen3" if config.qk_norm == "head" else "Llama"
    kind: Any = getattr(transformers, f"{prefix}Config")
    family: Any = getattr(transformers, f"{prefix}ForCausalLM")
    raw = {key: value for key, value in models.raw_config(name).items() if key not in ("architectures", "model_type")}
    settings = kind(**{**raw, "attn_implementation": "sdpa"})
    with torch.device("meta"):
        model: Any = family(settings)
    tensors = dict(models.checkpoint_tensors(config, weights))
    model.load_state_dict({**tensors, "lm_head.weight": weights.head}, assign=True, strict=True)
    if config.is_tied:
        model.tie_weights()
    with torch.device(weights.embedding.device):  # the one thing that is in no checkpoint
        model.model.rotary_emb = type(model.model.rotary_emb)(config=model.config)
    return model.eval().requires_grad_(False)
