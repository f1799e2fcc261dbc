"""The gated delta rule: chunks and recurrence agree, and both with their definition."""

import random

import pytest
import torch
import torch.nn.functional as F
from examples import examples
from hypothesis import given
from hypothesis import strategies as st

from lm_from_scratch.layers.delta_rule import chunk_delta_rule, recurrent_delta_rule, unit_length
from lm_from_scratch.layers.short_convolution import short_convolution

B, H, K, V = 2, 3, 5, 7


def inputs(T: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    """q, k, v, g, beta and a state that is not empty."""
    draw = torch.Generator().manual_seed(seed)
    q, k = (torch.randn(B, H, T, K, generator=draw, dtype=dtype) for _ in range(2))
    v, state = (torch.randn(B, H, n, V, generator=draw, dtype=dtype) for n in (T, K))
    g, beta = (torch.rand(B, H, T, generator=draw, dtype=dtype) for _ in range(2))
    return [unit_length(q), unit_length(k), v, g.log(), beta, state]


def close(have, want, bound: float = 1e-11) -> None:
    for x, y in zip(have, want, strict=True):
        torch.testing.assert_close(x, y, atol=bound, rtol=bound)


def test_the_recurrence_is_its_definition() -> None:
    """With the matrix written out: S <- alpha (I - beta k k^T) S + beta k v^T."""
    q, k, v, g, beta, state = inputs(6)
    y, last = recurrent_delta_rule(q, k, v, g, beta, state)
    for b in range(B):
        for h in range(H):
            S = state[b, h]
            for t in range(6):
                key, rate = k[b, h, t], beta[b, h, t]
                keep = torch.eye(K).double() - rate * torch.outer(key, key)
                S = g[b, h, t].exp() * keep @ S + rate * torch.outer(key, v[b, h, t])
                close([y[b, h, t]], [S.T @ q[b, h, t]])
            close([last[b, h]], [S])


@examples(20, 60)
@given(
    T=st.integers(1, 150), chunk=st.integers(1, 160), seed=st.integers(0, 99), docs=st.booleans()
)
def test_chunks_of_any_size_agree_with_the_recurrence(T, chunk, seed, docs) -> None:
    """From a state that is not empty, with documents that begin anywhere."""
    forget = None
    if docs:
        forget = torch.rand(B, T, generator=torch.Generator().manual_seed(seed)) < 0.1
    want = recurrent_delta_rule(*inputs(T, seed), forget)
    close(chunk_delta_rule(*inputs(T, seed), forget, chunk), want)


@pytest.mark.parametrize("T", [1, 64, 65, 130])
def test_gradients_of_both_forms_agree(T: int) -> None:
    gradients = []
    forget = torch.rand(B, T, generator=torch.Generator().manual_seed(0)) < 0.05
    for rule in (recurrent_delta_rule, chunk_delta_rule):
        leaves = [x.requires_grad_() for x in inputs(T)]
        y, state = rule(*leaves, forget)
        (y.sin().sum() + state.cos().sum()).backward()
        gradients.append([x.grad for x in leaves])
    close(*gradients, bound=1e-9)


@pytest.mark.parametrize("rule", [recurrent_delta_rule, chunk_delta_rule])
def test_laws(rule) -> None:
    q, k, v, g, beta, state = inputs(80)
    y, last = rule(q, k, v, g, beta, state)
    # in two parts
    first, between = rule(*(x[:, :, :33] for x in (q, k, v, g, beta)), state)
    second, end = rule(*(x[:, :, 33:] for x in (q, k, v, g, beta)), between)
    close([torch.cat([first, second], dim=2), end], [y, last])
    # no token changes an earlier output
    changed = v.clone()
    changed[:, :, 50] += 1.0
    assert torch.equal(rule(q, k, changed, g, beta, state)[0][:, :, :50], y[:, :, :50])
    # what neither fades nor is written changes nothing
    none = torch.zeros_like(g)
    close([rule(q, k, v, none, none, state)[1]], [state])
    # written with all its strength, a key says its value, whatever it said before
    k = F.normalize(k, dim=-1)
    y, _ = rule(k, k, v, g, torch.ones_like(beta), state)
    close([y], [v])
    # a document's first token begins with nothing
    forget = torch.zeros(B, 80, dtype=torch.bool)
    forget[:, [0, 40]] = True
    y, last = rule(q, k, v, g, beta, state, forget)
    alone = rule(*(x[:, :, 40:] for x in (q, k, v, g, beta)), torch.zeros_like(state))
    close([y[:, :, 40:], last], alone)


def test_with_keys_at_right_angles_there_is_nothing_to_correct() -> None:
    """Then the rule is linear attention: a sum of outer products."""
    k = torch.eye(K).double()[None, None].expand(B, H, K, K)
    v, one = inputs(K)[2], torch.ones(B, H, K).double()
    _, state = chunk_delta_rule(k, k, v, 0 * one, one, torch.zeros(B, H, K, V).double())
    close([state], [k.mT @ v])


@pytest.mark.parametrize("seed", range(25))
def test_against_transformers(seed: int) -> None:
    """Both forms beside both of theirs, at drawn sizes, which may be several chunks or one token:
    outputs, the last state, and the gradients of all that goes in."""
    from transformers.models.qwen3_next import modeling_qwen3_next as hf

    draw = random.Random(f"delta rule {seed}")
    B, H, K, V = (
        draw.choice([1, 2, 3]),
        draw.choice([1, 2, 4]),
        *draw.choices([4, 6, 10, 16], k=2),
    )
    T = draw.choice([1, 5, 63, 64, 65, 150])
    make = torch.Generator().manual_seed(seed)

    def numbers(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=make)

    q, k = (unit_length(numbers(B, H, T, K)) for _ in range(2))
    g, beta = -numbers(B, H, T).abs() * draw.choice([0.01, 1.0]), numbers(B, H, T).sigmoid()
    given = [q, k, numbers(B, H, T, V), g, beta, numbers(B, H, K, V)]
    upstream = numbers(B, H, T, V), numbers(B, H, K, V)
    found = []
    for form in (hf.torch_recurrent_gated_delta_rule, hf.torch_chunk_gated_delta_rule):
        *tokens, state = leaves = [x.clone().requires_grad_() for x in given]
        theirs = [x.transpose(1, 2) for x in tokens]
        y, last = form(*theirs, initial_state=state, output_final_state=True)
        y = y.transpose(1, 2) * K**0.5  # theirs divides the queries
        found.append([y, last, *torch.autograd.grad((y, last), leaves, upstream)])
    for rule in (recurrent_delta_rule, chunk_delta_rule):
        leaves = [x.clone().requires_grad_() for x in given]
        y, last = rule(*leaves)
        have = [y, last, *torch.autograd.grad((y, last), leaves, upstream)]
        for want in found:
            close(have[:2], want[:2], bound=2e-5)
            close(have[2:], want[2:], bound=1e-4)


@pytest.mark.parametrize("rule", [recurrent_delta_rule, chunk_delta_rule])
def test_half_precision_is_computed_in_float32(rule) -> None:
    tokens = [x.to(torch.bfloat16) for x in inputs(70)[:5]]
    state = inputs(70)[5].float()
    y, last = rule(*tokens, state)
    want, held = rule(*(x.float() for x in tokens), state)
    assert y.dtype == torch.bfloat16 and torch.equal(y, want.bfloat16())
    assert last.dtype == torch.float32 and torch.equal(last, held)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(rule(*(x.float() for x in tokens), state)[0], want)


def test_extreme_gates_give_numbers() -> None:
    """A gate of -1e3 forgets all; the sums of such gates would overflow where they are exponents of
    the other sign."""
    q, k, v, g, beta, state = inputs(70, dtype=torch.float32)
    g = torch.where(torch.rand(g.shape) < 0.3, torch.full_like(g, -1e3), g)
    have, want = (
        rule(q, k, v, g, beta, state) for rule in (chunk_delta_rule, recurrent_delta_rule)
    )
    close(have, want, bound=5e-3)  # of a sum near -2e4 the digits behind 1e-3 are lost
    g.requires_grad_()
    chunk_delta_rule(q, k, v, g, beta, state)[0].sum().backward()
    assert g.grad.isfinite().all()


def test_what_does_not_fit_is_refused() -> None:
    q, k, v, g, beta, state = inputs(4)
    for wrong, reason in [
        (
            (q[..., :3], k, v, g, beta, state),
            r"q has shape \(2, 3, 4, 3\), for keys \(2, 3, 4, 5\)",
        ),
        ((q, k, v[:, :, :3], g, beta, state), r"v has shape \(2, 3, 3, 7\)"),
        ((q, k, v, g[..., None], beta, state), r"g has shape \(2, 3, 4, 1\)"),
        ((q, k, v, g, beta[:, :1], state), r"beta has shape \(2, 1, 4\)"),
        ((q, k, v, g, beta, state.mT), r"state has shape \(2, 3, 7, 5\)"),
        ((q, k, v, g, beta, state, g[0] < 0), r"forget has shape \(3, 4\)"),
    ]:
        for rule in (recurrent_delta_rule, chunk_delta_rule):
            with pytest.raises(ValueError, match=reason):
                rule(*wrong)
    with pytest.raises(ValueError, match="chunk=0 must be a whole number of at least 1"):
        chunk_delta_rule(q, k, v, g, beta, state, chunk=0)


# ---------------------------------------------------------------------------- the convolution


@pytest.mark.parametrize("taps", [1, 2, 4])
@pytest.mark.parametrize("T", [1, 2, 9])
def test_the_convolution_is_that_of_torch(taps: int, T: int) -> None:
    x, weight = torch.randn(2, T, 5).double(), torch.randn(5, taps).double()
    y, state = short_convolution(x, weight, torch.zeros(2, taps - 1, 5).double())
    want = F.conv1d(x.mT, weight[:, None], padding=taps - 1, groups=5)[..., :T].mT
    close([y], [want])
    padded = F.pad(x, (0, 0, taps - 1, 0))
    assert torch.equal(state, padded[:, T:])


@pytest.mark.parametrize("seed", range(20))
def test_the_convolution_in_parts_with_padding_anywhere(seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    x, weight = torch.randn(3, 12, 5, generator=draw), torch.randn(5, 4, generator=draw)
    real = torch.rand(3, 12, generator=draw) < 0.6
    positions = torch.where(real, real.cumsum(1) - 1, -1)
    state, outputs = torch.zeros(3, 3, 5), []
    for now in (slice(0, 5), slice(5, 6), slice(6, 12)):
        y, state = short_convolution(x[:, now], weight, state, positions[:, now])
        outputs.append(y)
    y = torch.cat(outputs, dim=1)
    for row in range(3):
        alone = x[row, real[row]][None]
        want, last = short_convolution(alone, weight, torch.zeros(1, 3, 5))
        close([y[row, real[row]], state[row]], [want[0], last[0]], bound=1e-6)
