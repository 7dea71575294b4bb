"""Shapes without a meaning are refused; positions see only what came before them."""

import pytest
import torch

from tools.training.model import ModelShape, TrainingModel


def test_a_position_does_not_see_later_tokens(shape: ModelShape) -> None:
    """Changing the last token leaves the logits of all earlier positions as they were."""
    model = TrainingModel(shape)
    token_ids = torch.arange(17)[None]
    changed = token_ids.clone()
    changed[0, -1] = 200
    first, second = model(token_ids), model(changed)
    assert torch.equal(first[0, :-1], second[0, :-1])
    assert not torch.equal(first[0, -1], second[0, -1])


def test_the_shipped_shape_fits_eleven_megabytes() -> None:
    """Two bytes a parameter, embeddings counted once."""
    model = TrainingModel(ModelShape())
    assert 4.5e6 < model.num_parameters() < 5.5e6


@pytest.mark.parametrize("settings", [{"num_heads": 5, "num_kv_heads": 2}, {"head_dim": 13}])
def test_shapes_without_a_meaning_are_refused(settings: dict[str, int]) -> None:
    """Heads must divide into groups, and rotary positions need pairs."""
    with pytest.raises(ValueError, match=r"num_kv_heads|head_dim"):
        ModelShape(**settings)
