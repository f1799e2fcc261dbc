"""Multi-head latent attention: two orders of the same products."""

import math
import random

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from lm_from_scratch.attention.attention import formula_attention
from lm_from_scratch.attention.kinds import ATTENTION_KINDS
from lm_from_scratch.attention.latent import absorbed, expanded, multiplications
from lm_from_scratch.attention.sdpa import sdpa_attention
from lm_from_scratch.attention.visibility import Visibility


def drawn(seed: int, T: int | None = None):
    """Sizes, and a query, latents, turned keys and a matrix of these sizes, in float64."""
    draw = random.Random(seed)
    B, H, R, Dn, Dv = (draw.choice([1, 2, 3, 5, 8, 12]) for _ in range(5))
    Dr, S = draw.choice([2, 4, 6]), draw.choice([1, 4, 9])
    T = draw.randint(1, S) if T is None else T
    make = torch.Generator().manual_seed(seed)

    def tensor(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=make, dtype=torch.float64).requires_grad_()

    inputs = [
        tensor(B, H, T, Dn + Dr),
        tensor(B, 1, S, R),
        tensor(B, 1, S, Dr),
        tensor(H * (Dn + Dv), R),
    ]
    return (T, S, R, Dn, Dr, Dv), inputs


def seen(seed: int, T: int, S: int, B: int) -> Visibility:
    """The last T of S tokens, of which some may be padding, perhaps through a window."""
    draw = random.Random(seed)
    keys = torch.arange(S).repeat(B, 1)
    for row in range(B):
        keys[row, : draw.choice([0, 0, min(2, S - 1)])] = -1
    window = draw.choice([None, None, 2])
    return Visibility(keys[:, S - T :], keys, window=window)


@pytest.mark.parametrize("seed", range(30))
def test_both_orders_agree_in_value_and_gradient(seed: int) -> None:
    (T, S, *_), (q, latent, shared, weight) = drawn(seed)
    how = seen(seed, T, S, len(q)), formula_attention
    results = [
        expanded(q, latent @ weight.T, shared, *how),
        absorbed(q, latent, shared, weight, *how),
    ]
    torch.testing.assert_close(*results, atol=1e-10, rtol=1e-10)
    upstream = torch.randn_like(results[0])
    gradients = [torch.autograd.grad(y, (q, latent, shared, weight), upstream) for y in results]
    torch.testing.assert_close(*gradients, atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("seed", range(6))
def test_they_are_attention_with_keys_and_values_of_each_head(seed: int) -> None:
    """The formula of the paper, one head and one query after the other."""
    (T, S, _, Dn, Dr, _), (q, latent, shared, weight) = drawn(seed)
    B, H = q.shape[:2]
    visibility = seen(seed, T, S, B)
    y = absorbed(q, latent, shared, weight, visibility, formula_attention)
    for b in range(B):
        for h in range(H):
            w_k, w_v = weight.view(H, -1, weight.shape[1])[h].tensor_split([Dn])
            keys = torch.cat([latent[b, 0] @ w_k.T, shared[b, 0]], dim=-1)  # (S, Dn + Dr)
            for t in range(T):
                visible = visibility.mask[b, 0, t]
                scores = (keys @ q[b, h, t] / math.sqrt(Dn + Dr))[visible]
                want = scores.softmax(0) @ (latent[b, 0] @ w_v.T)[visible]
                torch.testing.assert_close(y[b, h, t], want, atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize("kind", ATTENTION_KINDS)
@torch.no_grad()
def test_every_kind_of_attention_can_be_used(kind: str) -> None:
    for seed in range(12):
        (T, S, *_), (q, latent, shared, weight) = drawn(seed)
        visibility, attend = seen(seed, T, S, len(q)), ATTENTION_KINDS[kind]
        real = (visibility.query_positions >= 0)[:, None, :, None]
        want = expanded(q, latent @ weight.T, shared, visibility, formula_attention)
        for y in (
            expanded(q, latent @ weight.T, shared, visibility, attend),
            absorbed(q, latent, shared, weight, visibility, attend),
        ):
            torch.testing.assert_close(y * real, want * real, atol=1e-10, rtol=1e-10)


@torch.no_grad()
def test_one_query_alone_on_the_fast_path() -> None:
    for seed in range(12):
        (_, S, *_), (q, latent, shared, weight) = drawn(seed, T=1)
        places = torch.arange(S)[None]
        known = Visibility(places[:, -1:], places, dense=True)
        want = expanded(q, latent @ weight.T, shared, known, formula_attention)
        y = absorbed(q, latent, shared, weight, known, sdpa_attention)
        torch.testing.assert_close(y, want, atol=1e-10, rtol=1e-10)


@torch.no_grad()
def test_multiplications_are_those_that_are_done() -> None:
    for seed in range(12):
        sizes, (q, latent, shared, weight) = drawn(seed)
        T, S = sizes[:2]
        places = torch.arange(S)[None]
        how = Visibility(places[:, S - T :], places), formula_attention
        per_head = q.shape[0] * q.shape[1]
        with FlopCounterMode(display=False) as first:
            expanded(q, latent @ weight.T, shared, *how)
        with FlopCounterMode(display=False) as second:
            absorbed(q, latent, shared, weight, *how)
        counts = [c.get_total_flops() // 2 // per_head for c in (first, second)]
        assert tuple(counts) == multiplications(*sizes)


def test_where_the_forms_cross() -> None:
    """At the size of DeepSeek-V3: one query is 120 times cheaper absorbed, a prompt 3 times dearer;
    between them about 170 queries after a long cache."""
    sizes = dict(R=512, Dn=128, Dr=64, Dv=128)
    decode = multiplications(1, 4096, **sizes)
    assert 115 < decode[0] / decode[1] < 120
    prefill = multiplications(4096, 4096, **sizes)
    assert 2.5 < prefill[1] / prefill[0] < 3.4
    counts = [multiplications(T, 10**6, **sizes) for T in range(1, 4096)]
    assert [absorbing < expanding for expanding, absorbing in counts].index(False) + 1 == 171
    for T in range(1, 2000, 7):  # whatever the length, a prompt alone is expanded
        whole = multiplications(T, T, **sizes)
        assert whole[0] < whole[1]
