"""The training loop: Muon for the matrices, AdamW for the rest, and a budget in minutes or steps.

A batch depends only on (seed, step), so a resumed run gets the same tokens; with a budget in steps it ends with the
same bits. Muon: Keller Jordan et al., "Muon: an optimizer for hidden layers in neural networks" (2024), as implemented
in ``torch.optim.Muon``.
"""

import dataclasses
import logging
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tools.training.model import ModelShape, TrainingModel

__all__ = ["CheckpointMismatch", "Progress", "Trainer", "TrainingConfig", "measure_loss"]

_LOGGER = logging.getLogger(__name__)
_SMOOTHING = 0.99


class CheckpointMismatch(ValueError):
    """The checkpoint was written by a run with other settings than this one."""


@dataclass(frozen=True, slots=True)
class TrainingConfig:
    """Settings of one run. Exactly one of ``minutes`` and ``steps`` is the budget.

    Attributes:
        minutes: Budget of wall time inside the loop, over all resumed parts, in minutes.
        steps: Budget of optimizer steps.
        seed: Determines the initial weights and the batches.
        tokens_per_step: Tokens in a batch, a multiple of every window length.
        window_lengths: Tokens per window; the steps use the entries in turn.
        muon_lr: Learning rate of the matrices.
        adamw_lr: Learning rate of the embedding and the norms.
        weight_decay: Decoupled weight decay of the matrices.
        warmup_steps: Number of steps in which the rate rises to its full value.
        decay_from: Share of the budget after which the rate falls linearly to zero.
        use_compile: Compile the loss with ``torch.compile``, which requires a C++ compiler.
    """

    minutes: float | None = 90.0
    steps: int | None = None
    seed: int = 1
    tokens_per_step: int = 4096
    window_lengths: tuple[int, ...] = (256, 256, 256, 512, 256, 256, 256, 1024)
    muon_lr: float = 0.02
    adamw_lr: float = 3e-3
    weight_decay: float = 0.1
    warmup_steps: int = 20
    decay_from: float = 0.5
    use_compile: bool = False

    def __post_init__(self) -> None:
        """Refuse an ambiguous budget, and windows that do not fill a batch."""
        if (self.minutes is None) == (self.steps is None):
            raise ValueError(f"give minutes or steps, not both: minutes={self.minutes} steps={self.steps}")
        for length in self.window_lengths:
            if self.tokens_per_step % length:
                raise ValueError(f"tokens_per_step {self.tokens_per_step} is not a multiple of window length {length}")


@dataclass(slots=True)
class Progress:
    """The progress of a run.

    Attributes:
        step: Optimizer steps taken.
        elapsed_s: Seconds spent in steps, over all resumed parts.
        num_tokens: Tokens seen, counting repeats.
        train_loss: Smoothed training loss in nats per token; NaN before the first step.
    """

    step: int = 0
    elapsed_s: float = 0.0
    num_tokens: int = 0
    train_loss: float = math.nan


@dataclass
class Trainer:
    """One run: the model, both optimizers and the progress.

    Invariant: a checkpoint contains everything that determines the next step, so a resumed run equals one that was not
    stopped.

    Attributes:
        config: Settings of the run.
        shape: Shape of the model.
        tokens: uint16 [num_tokens], the training stream; not changed.
        model: The weights, float32.
        progress: The progress of the run.
    """

    config: TrainingConfig
    shape: ModelShape
    tokens: npt.NDArray[np.uint16]
    model: TrainingModel = field(init=False)
    progress: Progress = field(init=False, default_factory=Progress)

    def __post_init__(self) -> None:
        """Initialise the weights and the optimizers from the seed."""
        longest = max(self.config.window_lengths)
        if len(self.tokens) <= longest:
            raise ValueError(f"{len(self.tokens)} training tokens cannot fill a window of {longest} and its target")
        torch.manual_seed(self.config.seed)
        self.model = TrainingModel(self.shape)
        self._optimizers = _make_optimizers(self.model, self.config)
        self._loss: Callable[[Tensor], Tensor] = self.model.loss
        if self.config.use_compile:
            self._loss = torch.compile(self.model.loss, dynamic=False)

    @property
    def fraction(self) -> float:
        """The share of the budget that is used, from 0 to 1."""
        if self.config.steps is not None:
            return min(1.0, self.progress.step / max(1, self.config.steps))
        return min(1.0, self.progress.elapsed_s / (60.0 * (self.config.minutes or 0.0) or 1.0))

    def step(self) -> float:
        """Take one optimizer step.

        Returns:
            The loss of this batch before the step, in nats per token.
        """
        started = time.monotonic()
        self._set_learning_rates()
        windows = self._batch()
        with torch.autocast("cpu", torch.bfloat16):
            loss = self._loss(windows)
        loss.backward()  # type: ignore[no-untyped-call]
        for optimizer in self._optimizers:
            optimizer.step()
            optimizer.zero_grad()
        value = loss.item()
        self._advance(value, time.monotonic() - started)
        return value

    def save(self, path: Path) -> None:
        """Write a checkpoint. An existing file is replaced only after the new one is complete.

        Args:
            path: The file; its folder must exist.
        """
        partial = path.with_suffix(".partial")
        torch.save(
            {
                "identity": self._identity(),
                "progress": dataclasses.asdict(self.progress),
                "model": self.model.state_dict(),
                "optimizers": [optimizer.state_dict() for optimizer in self._optimizers],
            },
            partial,
        )
        partial.replace(path)

    def load(self, path: Path) -> None:
        """Continue from a checkpoint.

        Args:
            path: A file that ``save`` wrote.

        Raises:
            CheckpointMismatch: It was written with another shape, corpus or batch order.
        """
        state = torch.load(path, weights_only=True)
        if state["identity"] != self._identity():
            raise CheckpointMismatch(
                f"checkpoint {path.name} was written by {state['identity']}, this run is {self._identity()}; "
                "use the same settings or another folder"
            )
        self.model.load_state_dict(state["model"])
        for optimizer, saved in zip(self._optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.progress = Progress(**state["progress"])
        _LOGGER.info("resumed step=%d elapsed_s=%.0f", self.progress.step, self.progress.elapsed_s)

    def _identity(self) -> dict[str, Any]:
        """Return the settings that a resumed run must share; the budget may differ."""
        return {
            "shape": dataclasses.asdict(self.shape),
            "seed": self.config.seed,
            "tokens_per_step": self.config.tokens_per_step,
            "window_lengths": list(self.config.window_lengths),
            "num_corpus_tokens": len(self.tokens),
        }

    def _batch(self) -> Tensor:
        """Return random windows of the stream, int64 [num_windows, length + 1]."""
        step = self.progress.step
        length = self.config.window_lengths[step % len(self.config.window_lengths)]
        generator = np.random.default_rng([self.config.seed, step])
        starts = generator.integers(0, len(self.tokens) - length, self.config.tokens_per_step // length)
        return _windows(self.tokens, starts, length)

    def _set_learning_rates(self) -> None:
        """Set the rates: a short rise to the full rate, later a linear fall to zero at the end of the budget."""
        rise = min(1.0, (self.progress.step + 1) / max(1, self.config.warmup_steps))
        fall = min(1.0, (1.0 - self.fraction) / (1.0 - self.config.decay_from))
        for optimizer, rate in zip(self._optimizers, (self.config.muon_lr, self.config.adamw_lr), strict=True):
            for group in optimizer.param_groups:
                group["lr"] = rate * (rise * fall)

    def _advance(self, loss: float, seconds: float) -> None:
        progress = self.progress
        smoothed = progress.train_loss * _SMOOTHING + loss * (1.0 - _SMOOTHING)
        progress.train_loss = loss if math.isnan(progress.train_loss) else smoothed
        progress.step += 1
        progress.elapsed_s += seconds
        progress.num_tokens += self.config.tokens_per_step


def measure_loss(
    model: TrainingModel, tokens: npt.NDArray[np.uint16], *, length: int = 256, max_windows: int | None = None
) -> float:
    """Return the mean loss over adjacent windows, under the same autocast as in training.

    Args:
        model: The weights; not changed.
        tokens: uint16 [num_tokens], the stream to predict.
        length: Tokens per window; each window starts without context.
        max_windows: Most windows to measure, spread evenly; None: all.

    Returns:
        Nats per token.

    Raises:
        ValueError: The stream is shorter than one window.
    """
    starts = np.arange(0, len(tokens) - length, length)
    if not len(starts):
        raise ValueError(f"{len(tokens)} tokens are too few for one window of {length} and its target")
    if max_windows is not None and max_windows < len(starts):
        starts = starts[np.linspace(0, len(starts) - 1, max_windows).astype(np.int64)]
    windows = _windows(tokens, starts, length)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        sums = [model.loss(part).item() * len(part) for part in torch.split(windows, 16)]
    return sum(sums) / len(windows)


def _windows(tokens: npt.NDArray[np.uint16], starts: npt.NDArray[np.int64], length: int) -> Tensor:
    """Return the tokens at each start and the ``length`` tokens after it, int64 [num_windows, length + 1]."""
    return torch.from_numpy(tokens[starts[:, None] + np.arange(length + 1)].astype(np.int64))


def _make_optimizers(model: TrainingModel, config: TrainingConfig) -> tuple[torch.optim.Optimizer, ...]:
    named = list(model.named_parameters())
    matrices = [p for name, p in named if p.ndim == 2 and "embed" not in name]
    rest = [p for name, p in named if p.ndim != 2 or "embed" in name]
    muon = torch.optim.Muon(matrices, lr=config.muon_lr, weight_decay=config.weight_decay)
    adamw = torch.optim.AdamW(rest, lr=config.adamw_lr, betas=(0.9, 0.95), weight_decay=0.0)
    return muon, adamw
