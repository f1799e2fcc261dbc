"""sampling.py: every step equals transformers' own, and drawing gives the distribution."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import (
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from lm_from_scratch.generation import sampling
from lm_from_scratch.generation.sampling import (
    GREEDY,
    Sampler,
    apply_repetition_penalty,
    apply_temperature,
    draw,
    is_number,
    keep_top_k,
    keep_top_p,
)


def random_logits(seed: int, B: int = 3, V: int = 41, scale: float = 3.0) -> torch.Tensor:
    return torch.randn(B, V, generator=torch.Generator().manual_seed(seed)) * scale


def seen_mask(idx: torch.Tensor, V: int = 41) -> torch.Tensor:
    return torch.zeros(idx.shape[0], V, dtype=torch.bool).scatter(1, idx, True)


@given(
    st.integers(0, 10**6),
    st.floats(0.05, 5.0),
    st.integers(1, 60),
    st.floats(0.01, 0.99),
    st.floats(0.2, 4.0),
)
def test_each_step_equals_transformers(seed, temperature, k, p, penalty) -> None:
    logits = random_logits(seed)
    idx = torch.randint(0, 41, (3, 6), generator=torch.Generator().manual_seed(seed + 1))
    pairs = [
        (apply_temperature(logits, temperature), TemperatureLogitsWarper(temperature)),
        (keep_top_k(logits, k), TopKLogitsWarper(min(k, 41))),
        (keep_top_p(logits, p), TopPLogitsWarper(p)),
        (
            apply_repetition_penalty(logits, seen_mask(idx), penalty),
            RepetitionPenaltyLogitsProcessor(penalty),
        ),
    ]
    for ours, theirs in pairs:
        torch.testing.assert_close(ours, theirs(idx, logits.clone()), atol=1e-5, rtol=1e-6)


def test_the_order_is_penalty_temperature_top_k_top_p() -> None:
    logits, idx = random_logits(0), torch.randint(0, 41, (3, 6))
    sampler = Sampler(temperature=0.7, top_k=20, top_p=0.8, repetition_penalty=1.5)
    want = logits.clone()
    for step in (
        RepetitionPenaltyLogitsProcessor(1.5),
        TemperatureLogitsWarper(0.7),
        TopKLogitsWarper(20),
        TopPLogitsWarper(0.8),
    ):
        want = step(idx, want)
    torch.testing.assert_close(sampler.logits(logits, seen_mask(idx)), want)


def test_the_penalty_never_makes_a_token_more_likely() -> None:
    logits = torch.tensor([[2.0, -1.0, 0.5, -3.0]])
    before = logits.softmax(-1)
    for token in range(4):
        seen = torch.zeros(1, 4, dtype=torch.bool)
        seen[0, token] = True
        after = apply_repetition_penalty(logits, seen, 1.3).softmax(-1)
        assert after[0, token] < before[0, token]
        wrong = torch.where(seen, logits / 1.3, logits).softmax(-1)
        assert (wrong[0, token] > before[0, token]) == (logits[0, token] < 0)


def test_every_row_is_penalised_for_its_own_tokens() -> None:
    logits = torch.ones(2, 5)
    out = apply_repetition_penalty(logits, seen_mask(torch.tensor([[1], [3]]), 5), 2.0)
    assert out.tolist() == [[1, 0.5, 1, 1, 1], [1, 1, 1, 0.5, 1]]


def test_top_p_is_the_smallest_set_that_reaches_p() -> None:
    logits = torch.tensor([[0.5, 0.3, 0.2]], dtype=torch.float64).log().float()
    for p, kept in ((0.4, 1), (0.51, 2), (0.79, 2), (0.81, 3), (1e-6, 1)):
        assert keep_top_p(logits, p).isfinite().sum() == kept
    exact = torch.tensor([[math.log(0.5), math.log(0.25), math.log(0.25)]])
    assert keep_top_p(exact, 0.5).isfinite().sum() == 1  # the historic code kept two


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"temperature": -0.5}, r"temperature=-0\.5"),
        ({"temperature": math.nan}, "temperature=nan"),
        ({"temperature": math.inf}, "temperature=inf"),
        ({"top_k": -1}, "top_k=-1"),
        ({"top_p": 0.0}, r"top_p=0\.0"),
        ({"top_p": 1.5}, r"top_p=1\.5"),
        ({"repetition_penalty": 0.0}, r"repetition_penalty=0\.0"),
    ],
)
def test_bad_values_are_refused(arguments: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Sampler(**arguments)


def test_temperature_zero_is_greedy_and_top_k_is_clamped() -> None:
    logits = random_logits(3)
    seen, u = torch.zeros(3, 41, dtype=torch.bool), torch.full((3,), 0.999)
    assert torch.equal(GREEDY(logits, seen, u), logits.argmax(-1))
    assert torch.equal(keep_top_k(logits, 10_000), logits)
    assert torch.equal(Sampler(top_k=1)(logits, seen, u), logits.argmax(-1))


def test_draw_lays_the_probabilities_end_to_end() -> None:
    logits = torch.tensor([[0.2, 0.5, 0.3]]).log()
    for u, token in ((0.0, 0), (0.19, 0), (0.21, 1), (0.69, 1), (0.71, 2), (1 - 2**-24, 2)):
        assert draw(logits, torch.tensor([u])).item() == token


def test_draw_never_gives_what_was_cut_off() -> None:
    logits = torch.full((1, 9), -math.inf)
    logits[0, 3] = 0.0
    for u in (0.0, 0.5, 1 - 2**-24):
        assert draw(logits, torch.tensor([u])).item() == 3
    logits = keep_top_k(random_logits(0, B=1), 5)
    line = torch.linspace(0, 1 - 2**-24, 5001)
    drawn = draw(logits.expand(5001, -1), line).unique()
    assert set(drawn.tolist()) == set(logits[0].isfinite().nonzero()[:, 0].tolist())


def test_draws_follow_the_distribution_by_chi_square() -> None:
    logits = random_logits(7, B=1, V=12, scale=1.0)
    n = 40_000
    u = torch.rand(n, generator=torch.Generator().manual_seed(0))
    counts = torch.bincount(draw(logits.expand(n, -1), u), minlength=12).double()
    expected = logits.double().softmax(-1)[0] * n
    chi_square = ((counts - expected) ** 2 / expected).sum().item()
    assert chi_square < 31.3  # the 0.1 % point for 11 degrees of freedom


@pytest.mark.parametrize(
    "sampler", [GREEDY, Sampler(), Sampler(temperature=1e-40), Sampler(repetition_penalty=1e-45)]
)
def test_logits_that_are_no_numbers_are_refused(sampler: Sampler) -> None:
    seen, u = torch.ones(2, 4, dtype=torch.bool), torch.full((2,), 0.5)
    good = torch.tensor([[1.0, 3.0, 2.0, -1.0]])
    bad_rows = [[math.nan, 0.0, 0.0, 0.0], [-math.inf] * 4, [math.inf, 0.0, 0.0, 0.0]]
    for bad in bad_rows:
        with pytest.raises(ValueError, match="the largest logit of row"):
            sampler(torch.cat([good, torch.tensor([bad])]), seen, u)
    if sampler.temperature == 1e-40 or sampler.repetition_penalty == 1e-45:
        with pytest.raises(ValueError, match="too extreme"):
            sampler(good, seen[:1], u[:1])


def test_draw_is_exact_over_a_large_vocabulary() -> None:
    V = 100_000
    wanted = torch.tensor([0, 1, 12_345, 77_777, V - 2, V - 1])
    u = (wanted.double() + 0.5) / V
    assert torch.equal(draw(torch.zeros(6, V), u), wanted)


def test_top_p_of_half_precision_logits_is_decided_in_float32() -> None:
    for seed in range(20):
        logits = random_logits(seed, B=4, V=997).half()
        want = keep_top_p(logits.float(), 0.9).isfinite()
        assert torch.equal(keep_top_p(logits, 0.9).isfinite(), want)


def test_the_tail_is_drawn_in_float64() -> None:
    logits = torch.tensor([[0.0, -25.0, -60.0]])  # the second has a probability of 1.4e-11
    u = torch.tensor([1 - 5e-12], dtype=torch.float64)
    assert draw(logits, u).item() == 1


@given(st.integers(0, 10**6), st.integers(1, 60), st.sampled_from([1, 7, 64]))
def test_blocks_draw_the_token_that_the_whole_line_has_there(seed: int, V: int, block: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = random_logits(seed, V=V).round()  # some are equal
    hidden = torch.rand(3, V, generator=generator) < 0.5
    logits = logits.masked_fill(hidden & (logits < logits.amax(dim=-1, keepdim=True)), -math.inf)
    line = logits.double().softmax(dim=-1).cumsum(dim=-1)
    u = torch.rand(3, generator=generator, dtype=torch.float64)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampling, "BLOCK", block)
        token = draw(logits, u)[:, None]
        assert torch.equal(token, torch.searchsorted(line, u[:, None], right=True))
        possible = logits.isfinite()
        first, last = draw(logits, torch.zeros(3)), draw(logits, torch.full((3,), 1 - 2.0**-53))
        assert torch.equal(first, possible.long().argmax(dim=-1))
        assert possible.gather(1, last[:, None]).all()


@given(st.integers(0, 10**6), st.integers(1, 60), st.floats(0.01, 0.99))
def test_top_p_sorts_no_more_than_it_needs_and_keeps_the_same(seed: int, V: int, p: float) -> None:
    logits = random_logits(seed, V=V)
    with pytest.MonkeyPatch.context() as patch:
        kept = [keep_top_p(logits, p)]
        patch.setattr(sampling, "HEAD", 3)
        kept.append(keep_top_p(logits, p))
    assert torch.equal(kept[0], kept[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_top_p_of_a_row_does_not_depend_on_the_others(dtype: torch.dtype) -> None:
    for seed in range(5):
        generator = torch.Generator().manual_seed(seed)
        steep = (torch.randn(2, 5000, generator=generator) * 4).to(dtype)  # many ties in bfloat16
        flat = torch.zeros(1, 5000, dtype=dtype)
        together = keep_top_p(torch.cat([steep, flat]), 0.9)
        for row, alone in enumerate([steep[:1], steep[1:], flat]):
            assert torch.equal(together[row : row + 1], keep_top_p(alone, 0.9))


def test_numpys_numbers_are_numbers_and_truth_is_none() -> None:
    assert all(map(is_number, [0, -1.5, np.float32(0.5), np.float16(2), np.int64(3)]))
    for other in (True, np.True_, np.float32("nan"), np.float64("inf"), np.ones(1), "1", None):
        assert not is_number(other)
