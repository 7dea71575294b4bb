"""The loop learns, resumes to the same bits and follows its budget."""

import dataclasses
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch

from tools.training.model import ModelShape
from tools.training.train import CheckpointMismatch, Trainer, TrainingConfig, measure_loss

Tokens = npt.NDArray[np.uint16]


def test_loss_goes_down(config: TrainingConfig, shape: ModelShape, tokens: Tokens) -> None:
    """Thirty steps on a repetitive corpus take the loss well below that of guessing."""
    trainer = Trainer(config, shape, tokens)
    before = measure_loss(trainer.model, tokens, length=32, max_windows=8)
    while trainer.fraction < 1.0:
        trainer.step()
    after = measure_loss(trainer.model, tokens, length=32, max_windows=8)
    assert before == pytest.approx(np.log(307), abs=0.2)
    assert after < 0.5 * before


def test_resumed_run_has_the_same_bits(
    config: TrainingConfig, shape: ModelShape, tokens: Tokens, tmp_path: Path
) -> None:
    """Stopping after five steps and going on gives what eight steps in one go give."""
    straight, first = Trainer(config, shape, tokens), Trainer(config, shape, tokens)
    losses = [straight.step() for _ in range(8)]
    for _ in range(5):
        first.step()
    first.save(tmp_path / "checkpoint.pt")
    resumed = Trainer(config, shape, tokens)
    resumed.load(tmp_path / "checkpoint.pt")
    assert [resumed.step() for _ in range(3)] == losses[5:]
    for name, tensor in straight.model.state_dict().items():
        assert torch.equal(tensor, resumed.model.state_dict()[name]), name


def test_checkpoint_of_another_run_is_refused(
    config: TrainingConfig, shape: ModelShape, tokens: Tokens, tmp_path: Path
) -> None:
    """Another seed, shape or corpus would silently train something else."""
    Trainer(config, shape, tokens).save(tmp_path / "checkpoint.pt")
    other = Trainer(dataclasses.replace(config, seed=2), shape, tokens)
    with pytest.raises(CheckpointMismatch, match="use the same settings or another folder"):
        other.load(tmp_path / "checkpoint.pt")


def test_learning_rate_rises_holds_and_falls_to_zero(config: TrainingConfig, shape: ModelShape, tokens: Tokens) -> None:
    """The rate is full between the warm-up and half of the budget and nothing is left at its end."""
    trainer = Trainer(dataclasses.replace(config, steps=8, warmup_steps=2), shape, tokens)
    rates = []
    while trainer.fraction < 1.0:
        trainer.step()
        rates.append(_muon_rate(trainer) / config.muon_lr)
    assert rates == pytest.approx([0.5, 1, 1, 1, 1, 0.75, 0.5, 0.25])


def test_a_budget_in_minutes_counts_time_not_steps(config: TrainingConfig, shape: ModelShape, tokens: Tokens) -> None:
    """The share of the budget follows the seconds spent in steps."""
    trainer = Trainer(dataclasses.replace(config, steps=None, minutes=0.5), shape, tokens)
    trainer.progress.elapsed_s = 15.0
    assert trainer.fraction == 0.5
    trainer.progress.elapsed_s = 40.0
    assert trainer.fraction == 1.0


@pytest.mark.parametrize("settings", [{"minutes": 1.0, "steps": 1}, {"minutes": None, "steps": None}])
def test_an_ambiguous_budget_is_refused(settings: dict[str, float | int | None]) -> None:
    """Exactly one of minutes and steps decides when a run ends."""
    with pytest.raises(ValueError, match="minutes or steps"):
        TrainingConfig(**settings)  # type: ignore[arg-type]


def test_windows_that_do_not_fill_a_batch_are_refused() -> None:
    """Every step must see the same number of tokens."""
    with pytest.raises(ValueError, match="not a multiple of window length 97"):
        TrainingConfig(window_lengths=(97,))


def test_a_corpus_shorter_than_a_window_is_refused(config: TrainingConfig, shape: ModelShape) -> None:
    """Too little text is an error before the first step, in training and in measuring."""
    few = np.zeros(17, dtype=np.uint16)
    with pytest.raises(ValueError, match="cannot fill a window of 96"):
        Trainer(config, shape, few)
    with pytest.raises(ValueError, match="too few"):
        measure_loss(Trainer(config, shape, np.zeros(97, dtype=np.uint16)).model, few, length=17)


def _muon_rate(trainer: Trainer) -> float:
    return float(trainer._optimizers[0].param_groups[0]["lr"])
