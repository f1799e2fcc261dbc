"""A dictionary finds directions that were planted, and the identity gives everything back."""

import pytest
import torch
import torch.nn.functional as F

from lm_from_scratch.inside.dictionary import Dictionary, fit_dictionary, match


def planted(n: int, C: int = 24, M: int = 40) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """States that are sums of 2 of M directions, in less room than M."""
    torch.manual_seed(0)
    directions = F.normalize(torch.randn(M, C), dim=-1)
    which = torch.rand(n, M).topk(2, -1).indices
    facts = torch.zeros(n, M).scatter(1, which, 1.0)
    return facts * (1 + torch.rand(n, M)) @ directions, facts.bool(), directions


def test_the_identity_gives_everything_back() -> None:
    x = torch.randn(50, 6)
    one = Dictionary(6, 12, 12)
    eye = torch.cat([torch.eye(6), -torch.eye(6)])  # a feature is not negative
    one.directions.data, one.encoder.data = eye, eye.T.clone()
    torch.testing.assert_close(one(x), x)
    assert one.unexplained(x) < 1e-12


def test_planted_directions_are_found() -> None:
    x, facts, directions = planted(4000)
    found = fit_dictionary(x, 40, 2, steps=600)
    assert (found.encode(x) > 0).sum(-1).max() <= 2
    best = match(found.encode(x), facts)
    cosines = (found.directions[best.feature] * directions).sum(-1)
    assert (cosines > 0.9).double().mean() > 0.8
    assert best.score.median() > 0.9
    assert found.unexplained(x) < 0.15


def test_the_same_seed_gives_the_same_dictionary_and_leaves_the_generator() -> None:
    x, _, _ = planted(200)
    torch.manual_seed(5)
    a = fit_dictionary(x, 8, 2, steps=5)
    drawn = torch.rand(3)
    b = fit_dictionary(x, 8, 2, steps=5)
    torch.manual_seed(5)
    assert torch.equal(torch.rand(3), drawn) and torch.equal(a.directions, b.directions)


def test_scores_are_f1_by_hand() -> None:
    features = torch.tensor([[1.0, 0, 0], [2, 1, 0], [0, 1, 0], [0, 1, 0]])
    facts = torch.tensor([[True], [True], [True], [False]])
    found = match(features, facts)
    assert found.feature.tolist() == [0] and found.dead == 1
    assert found.score[0].item() == pytest.approx(2 * 2 / (2 + 3))


def test_numbers_that_cannot_be_are_refused() -> None:
    with pytest.raises(ValueError, match="k=5 of n_features=4"):
        Dictionary(3, 4, 5)


def test_states_of_half_precision_get_a_dictionary_in_float32() -> None:
    x, _, _ = planted(200)
    half = (x.requires_grad_(True) * 1).bfloat16()
    found = fit_dictionary(half, 8, 2, steps=5)
    assert found.directions.dtype == torch.float32 and x.grad is None
    assert found.encode(half).dtype == torch.float32
