"""log_probs.py: what was said counts, what was given does not."""

import math

import pytest
import torch
from tiny_models import tiny_gpt2, token_ids
from torch import Tensor

from lm_from_scratch.text.targets import IGNORE, next_token_targets
from lm_from_scratch.training import log_probs
from lm_from_scratch.training.loss import causal_lm_loss


def drawn(seed: int = 0, B: int = 3, T: int = 5, V: int = 7) -> tuple[Tensor, Tensor]:
    """Logits with a gradient, and targets of which the first two columns are a prompt."""
    g = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(B, T, V, generator=g, dtype=torch.float64)
    targets = torch.randint(0, V, (B, T), generator=g)
    targets[:, :2] = targets[-1, -1:] = IGNORE
    return logits.requires_grad_(), targets


def test_each_is_the_logarithm_of_a_share() -> None:
    logits, targets = drawn()
    found = log_probs.token_log_probs(logits, targets)
    for b, row in enumerate(targets.tolist()):
        for t, token in enumerate(row):
            weights = [math.exp(z) for z in logits[b, t].tolist()]
            want = 0.0 if token == IGNORE else math.log(weights[token] / sum(weights))
            assert found[b, t].item() == pytest.approx(want, abs=1e-12)


def test_prompts_and_padding_count_nothing() -> None:
    logits, targets = drawn()
    found = log_probs.sequence_log_probs(logits, targets)
    (gradient,) = torch.autograd.grad(found.sum(), logits)
    assert found.shape == (3,)
    assert gradient[targets == IGNORE].abs().max() == 0
    assert (gradient[targets != IGNORE].abs().amax(dim=-1) > 0).all()
    other = torch.where((targets == IGNORE)[..., None], torch.randn_like(logits), logits)
    assert torch.equal(log_probs.sequence_log_probs(other, targets), found)


def test_their_mean_is_minus_the_loss() -> None:
    idx = token_ids(2, 9)
    targets, logits = next_token_targets(idx), tiny_gpt2()(idx)
    found = log_probs.token_log_probs(logits, targets)
    assert found.sum().item() / 16 == pytest.approx(-causal_lm_loss(logits, targets).item())


def test_the_answers_that_a_model_can_give_have_a_probability_of_one() -> None:
    """All 2 x 2 x 2 continuations of one prompt, by a model of two tokens."""
    model = tiny_gpt2(vocab_size=2, bos_token_id=1, eos_token_id=1).double()
    answers = torch.cartesian_prod(*[torch.arange(2)] * 3)
    idx = torch.cat([torch.tensor([[1, 0, 1]] * 8), answers], dim=1)
    targets = next_token_targets(idx)
    targets[:, :2] = IGNORE
    total = log_probs.sequence_log_probs(model(idx), targets).exp().sum()
    assert total.item() == pytest.approx(1.0, abs=1e-12)


def test_low_precision_is_cast_up_and_an_excluded_token_is_impossible() -> None:
    logits = torch.tensor([[[0.0, 0.0, -math.inf]] * 3], dtype=torch.bfloat16, requires_grad=True)
    found = log_probs.token_log_probs(logits, torch.tensor([[0, 2, IGNORE]]))
    assert found.dtype == torch.float32
    assert found.tolist()[0] == pytest.approx([-math.log(2), -math.inf, 0.0])
    (gradient,) = torch.autograd.grad(found[0, 0], logits)
    assert gradient.isfinite().all()


def test_the_gradient_is_right() -> None:
    logits, targets = drawn(1, 2, 4, 5)
    assert torch.autograd.gradcheck(lambda z: log_probs.token_log_probs(z, targets), logits)


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match=r"\(2, 3, 9\), targets \(2, 4\)"):
        log_probs.token_log_probs(torch.zeros(2, 3, 9), torch.zeros(2, 4, dtype=torch.long))
    for bad, message in ((9, "from 0 to 9"), (-1, "from -1 to 0")):
        with pytest.raises(ValueError, match=f"targets run {message}; they must be in 0 ... 8"):
            log_probs.token_log_probs(torch.zeros(1, 3, 9), torch.tensor([[0, bad, IGNORE]]))
