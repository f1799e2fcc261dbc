"""What all models share: large random weights, with which mistakes show."""

import pytest
import torch
from tiny_models import tiny_gpt2, tiny_qwen2

from lm_from_scratch.models.randomize import randomize_


@pytest.mark.parametrize("make", [tiny_gpt2, tiny_qwen2])
def test_randomize_is_large_repeatable_and_keeps_norms_around_one(make):
    model, twin, other = make(), make(), make()
    for each, seed in ((model, 0), (twin, 0), (other, 1)):
        randomize_(each, seed)
    for (name, p), q, r in zip(
        model.named_parameters(), twin.parameters(), other.parameters(), strict=True
    ):
        assert torch.equal(p, q) and not torch.equal(p, r)
        norm = p.dim() == 1 and name.endswith("weight")
        assert abs(p.mean() - float(norm)) < 5 * 0.25 / p.numel() ** 0.5
        assert 0.1 < p.std() < 0.4
    assert all(p.requires_grad for p in model.parameters())
    assert model(torch.arange(9)[None]).std() > 1


def test_randomize_takes_a_deviation():
    model = tiny_gpt2()
    randomize_(model, std=0.02)
    assert abs(model.head.weight.std() / 0.02 - 1) < 0.1
