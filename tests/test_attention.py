"""attention.py: one rule for visibility; the formula and the fused kernel obey it."""

import pytest
import torch
import torch.nn.functional as F
from conftest import tiny_gpt2, token_ids
from hypothesis import given
from hypothesis import strategies as st

from lm_from_scratch.attention import ATTENTION_KINDS, attention_weights, use_attention_
from lm_from_scratch.models.gpt2 import SIZES
from lm_from_scratch.record import record_attention
from lm_from_scratch.visibility import Visibility, positions_from_mask


def arange(n: int, start: int = 0) -> torch.Tensor:
    return torch.arange(start, start + n)[None]


def tensors(B=2, H=3, T=7, S=7, D=5, dtype=torch.float64, scale=1.0, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return tuple(
        torch.randn(B, H, n, D, generator=generator, dtype=torch.float64).mul(scale).to(dtype)
        for n in (T, S, S)
    )


def oracle(q, k, v, visible) -> torch.Tensor:
    """Attention in float64, one row after the other; ``visible(b, t, s)`` is Python."""
    q, k, v = q.double(), k.double(), v.double()
    out = torch.zeros_like(q)
    for b in range(q.shape[0]):
        for h in range(q.shape[1]):
            for t in range(q.shape[2]):
                keys = [s for s in range(k.shape[2]) if visible(b, t, s)]
                if keys:
                    scores = k[b, h, keys] @ q[b, h, t] / q.shape[-1] ** 0.5
                    out[b, h, t] = scores.softmax(0) @ v[b, h, keys]
    return out


def python_rule(vis: Visibility):
    def visible(b: int, t: int, s: int) -> bool:
        qp = vis.query_positions.expand(2, -1)[b, t].item()
        kp = vis.key_positions.expand(2, -1)[b, s].item()
        if kp < 0 or kp > qp:
            return False
        if vis.window is not None and qp - kp >= vis.window:
            return False
        if vis.query_documents is not None:
            return bool(vis.query_documents[b, t] == vis.key_documents[b, s])
        return True

    return visible


LEFT = torch.tensor([[-1, -1, 0, 1, 2, 3, 4], [0, 1, 2, 3, 4, 5, 6]])
RIGHT = torch.tensor([[0, 1, 2, 3, -1, -1, -1], [0, 1, 2, 3, 4, 5, 6]])
BOTH = torch.tensor([[-1, 0, 1, 2, -1, 3, -1], [0, -1, -1, 1, 2, 3, 4]])
DOCS = torch.tensor([[0, 0, 0, 1, 1, 2, 2], [0, 1, 1, 1, 1, 1, 1]])
PACKED = torch.tensor([[0, 1, 2, 0, 1, 0, 1], [0, 0, 1, 2, 3, 4, 5]])

CASES = {
    "causal": Visibility(arange(7), arange(7)),
    "causal, known": Visibility(arange(7), arange(7), dense=True),
    "one query, known": Visibility(arange(1, 6), arange(7), dense=True),
    "chunk after a cache, known": Visibility(arange(3, 4), arange(7), dense=True),
    "chunk after a cache": Visibility(arange(3, 4), arange(7)),
    "left padding": Visibility(LEFT, LEFT),
    "right padding": Visibility(RIGHT, RIGHT),
    "padding inside and on both sides": Visibility(BOTH, BOTH),
    "left padding, one query": Visibility(LEFT[:, -1:], LEFT),
    "window 1": Visibility(arange(7), arange(7), window=1),
    "window 2, known dense": Visibility(arange(7), arange(7), window=2, dense=True),
    "window 3, chunk": Visibility(arange(3, 4), arange(7), window=3, dense=True),
    "window 3, one query": Visibility(arange(1, 6), arange(7), window=3, dense=True),
    "window above the length": Visibility(arange(7), arange(7), window=99),
    "packed documents": Visibility(PACKED, PACKED, DOCS, DOCS),
    "keys in any order": Visibility(arange(7), torch.tensor([[3, 0, 6, 1, -1, 2, 5]])),
}


@pytest.mark.parametrize("kind", ATTENTION_KINDS)
@pytest.mark.parametrize("name", CASES)
def test_every_kind_equals_the_float64_oracle(name: str, kind: str) -> None:
    vis = CASES[name]
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 2e-6)):
        for scale in (1.0, 30.0):  # scores of several hundred
            q, k, v = tensors(T=vis.query_length, S=vis.key_length, dtype=dtype, scale=scale)
            ours = ATTENTION_KINDS[kind](q, k, v, vis, 0.0)
            want = oracle(q, k, v, python_rule(vis))
            assert ours.dtype == dtype
            # float32 scores of size 1000 carry an error of 1e-4, which the softmax passes on
            atol = tolerance * scale * (100 if scale > 1 and dtype == torch.float32 else 1)
            torch.testing.assert_close(ours.double(), want, atol=atol, rtol=0)


@pytest.mark.parametrize("name", CASES)
def test_gradients_of_both_kinds_agree_and_stay_finite(name: str) -> None:
    vis = CASES[name]
    grads = []
    for kind in ATTENTION_KINDS.values():
        leaves = [t.requires_grad_() for t in tensors(T=vis.query_length, S=vis.key_length)]
        kind(*leaves, vis, 0.0).square().sum().backward()
        grads.append([t.grad for t in leaves])
    for a, b in zip(*grads, strict=True):
        assert a.isfinite().all()
        torch.testing.assert_close(a, b, atol=1e-10, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kind", ATTENTION_KINDS)
def test_low_precision_stays_near_the_oracle(kind: str, dtype: torch.dtype) -> None:
    vis = CASES["left padding"]
    q, k, v = tensors(dtype=dtype)
    error = (
        ATTENTION_KINDS[kind](q, k, v, vis, 0.0).double() - oracle(q, k, v, python_rule(vis))
    ).abs()
    assert error.max() < (2e-3 if dtype == torch.float16 else 2e-2)


def test_weights_are_a_distribution_over_visible_keys() -> None:
    for vis in CASES.values():
        q, k, _ = tensors(T=vis.query_length, S=vis.key_length)
        weights = attention_weights(q, k, vis)
        visible = vis.mask.expand_as(weights)
        assert (weights[~visible] == 0).all()
        rows = visible.any(-1)
        torch.testing.assert_close(weights.sum(-1), rows.double(), atol=1e-12, rtol=0)


def test_the_known_causal_case_is_the_lower_triangle() -> None:
    vis = CASES["causal, known"]
    assert vis.is_causal
    assert torch.equal(vis.mask[0, 0], torch.ones(7, 7).tril().bool())
    assert not CASES["chunk after a cache, known"].is_causal
    assert not CASES["window 2, known dense"].is_causal


def test_chunk_mask_is_aligned_to_the_last_key_not_the_first() -> None:
    """SDPA's own ``is_causal`` is aligned to the first key: wrong after a cache."""
    vis = CASES["chunk after a cache, known"]
    q, k, v = tensors(T=3)
    wrong = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    right = ATTENTION_KINDS["sdpa"](q, k, v, vis, 0.0)
    assert (wrong - right).abs().max() > 0.1


def test_G25_hidden_scores_are_replaced_not_lowered() -> None:
    """With -10000 added to the scores, changing hidden keys changed real rows by 2.1."""
    q, k, v = tensors(scale=100.0, dtype=torch.float32)
    vis = CASES["left padding"]
    other_k, other_v = k.clone(), v.clone()
    other_k[0, :, :2] *= -7.0
    other_v[0, :, :2] += 1000.0
    for kind in ATTENTION_KINDS.values():
        before, after = kind(q, k, v, vis, 0.0), kind(q, other_k, other_v, vis, 0.0)
        assert torch.equal(before[0, :, 2:], after[0, :, 2:])


def test_G33_masks_of_any_integer_or_bool_dtype_become_positions() -> None:
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 0, 1, 0]])
    want = torch.tensor([[-1, -1, 0, 1, 2], [0, 1, -1, 2, -1]])
    for dtype in (torch.bool, torch.int64, torch.uint8, torch.float32):
        assert torch.equal(positions_from_mask(mask.to(dtype)), want)
    with pytest.raises(ValueError, match=r"shape \(5,\)"):
        positions_from_mask(mask[0])
    with pytest.raises(ValueError, match="0 and 1"):
        positions_from_mask(mask * 2)
    with pytest.raises(ValueError, match="0 and 1"):
        positions_from_mask(torch.tensor([[0.0, -10000.0]]))


def test_G33_a_mask_of_another_width_is_refused() -> None:
    model, idx = tiny_gpt2(), token_ids(2, 5)
    with pytest.raises(ValueError, match=r"\(2, 1\), the tokens \(2, 5\)"):
        model(idx, positions_from_mask(torch.ones(2, 1)))
    with pytest.raises(ValueError, match="integers"):
        model(idx, torch.ones(2, 5, dtype=torch.bool))


def test_bad_visibility_is_refused() -> None:
    with pytest.raises(ValueError, match="window=0"):
        Visibility(arange(3), arange(3), window=0)
    with pytest.raises(ValueError, match="both"):
        Visibility(arange(3), arange(3), query_documents=arange(3))


@given(st.integers(1, 3), st.integers(1, 9), st.integers(1, 10), st.integers(0, 10**6), st.data())
def test_random_padding_and_windows(B: int, T: int, window: int, seed: int, data) -> None:
    mask = torch.tensor(
        data.draw(
            st.lists(st.lists(st.integers(0, 1), min_size=T, max_size=T), min_size=B, max_size=B)
        )
    )
    positions = positions_from_mask(mask)
    vis = Visibility(positions, positions, window=window)
    q, k, v = tensors(B=B, T=T, S=T, seed=seed)
    want = oracle(
        q, k, v, lambda b, t, s: bool(mask[b, s])
        and 0 <= (positions[b, t] - positions[b, s]) < window
    )  # fmt: skip
    for kind in ATTENTION_KINDS.values():
        torch.testing.assert_close(kind(q, k, v, vis, 0.0), want, atol=1e-12, rtol=0)


def test_recording_returns_real_weights_and_changes_nothing() -> None:
    model, idx = tiny_gpt2(), token_ids(2, 9)
    before = model(idx)
    attends = [block.attn.attend for block in model.transformer.h]
    with record_attention(model) as maps:
        assert torch.equal(model(idx), before)
    assert [block.attn.attend for block in model.transformer.h] == attends
    assert len(maps) == model.config.n_layer
    for layer in maps:
        assert layer[0].shape == (2, 4, 9, 9)
        torch.testing.assert_close(layer[0].sum(-1), torch.ones(2, 4, 9))
        assert (layer[0].triu(1) == 0).all()


def test_recording_equals_the_attentions_of_transformers() -> None:
    from conftest import hf_twin

    model, idx = tiny_gpt2(), token_ids(2, 9)
    twin = hf_twin(model)
    twin.set_attn_implementation("eager")
    want = twin(idx, output_attentions=True).attentions
    with record_attention(model) as maps:
        model(idx)
    for ours, theirs in zip(maps, want, strict=True):
        torch.testing.assert_close(ours[0], theirs, atol=1e-5, rtol=0)


def test_recording_is_undone_after_an_error() -> None:
    model = tiny_gpt2()
    attends = [block.attn.attend for block in model.transformer.h]
    with pytest.raises(ValueError, match="block_size"), record_attention(model):
        model(token_ids(1, 65))
    assert [block.attn.attend for block in model.transformer.h] == attends


def test_switching_the_kind_is_one_call() -> None:
    model, idx = tiny_gpt2(), token_ids(2, 9)
    fused = model(idx)
    use_attention_(model, "formula")
    torch.testing.assert_close(model(idx), fused, atol=5e-5, rtol=0)
    with pytest.raises(ValueError, match="'flash9' is not one of"):
        use_attention_(model, "flash9")
    with pytest.raises(ValueError, match="no attention layer"):
        use_attention_(torch.nn.Linear(2, 2), "sdpa")


def test_the_published_sizes_have_whole_heads() -> None:
    assert all(size["n_embd"] // size["n_head"] == 64 for size in SIZES.values())


def test_scores_beyond_half_precision_are_computed_in_float32() -> None:
    q = torch.full((1, 1, 3, 64), 40.0).half()
    k = torch.full((1, 1, 3, 64), 40.0).half()
    k[..., 1, :] = 39.0  # q.k is 102400 and 99840, both above 65504
    k[..., 2, :] = -40.0
    weights = attention_weights(q, k, CASES_OF_THREE)
    want = (q.double() @ k.double().mT / 8).masked_fill(~CASES_OF_THREE.mask, -torch.inf)
    torch.testing.assert_close(weights.double(), want.softmax(-1), atol=1e-3, rtol=0)


CASES_OF_THREE = Visibility(arange(3), arange(3))


@pytest.mark.parametrize("kind", ATTENTION_KINDS)
def test_dropout_zeroes_weights_and_keeps_the_mean(kind: str) -> None:
    torch.manual_seed(0)
    q, k, v = tensors(B=64, H=16)
    vis = CASES["causal"]
    kept = ATTENTION_KINDS[kind](q, k, v, vis, 0.0)
    dropped = ATTENTION_KINDS[kind](q, k, v, vis, 0.5)
    first = dropped[:, :, 0] / kept[:, :, 0]  # the first query has one weight: 0 or doubled
    assert set(first.round().unique().tolist()) == {0.0, 2.0}
    assert 0.9 < first.mean() < 1.1


def test_recorded_weights_hold_no_graph() -> None:
    model = tiny_gpt2()
    with record_attention(model) as maps:
        model(token_ids(1, 5)).sum().backward()
    assert not any(layer[0].requires_grad for layer in maps)
