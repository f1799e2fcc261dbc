"""attention.py: one rule for visibility, which every kind obeys (suites/test_conformance.py)."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from tiny_models import tiny_gpt2, token_ids

from lm_from_scratch.attention.attention import attention_weights
from lm_from_scratch.attention.gqa import repeat_kv
from lm_from_scratch.attention.kinds import ATTENTION_KINDS, use_attention_
from lm_from_scratch.attention.layer import check_shapes
from lm_from_scratch.attention.masks import positions_from_mask
from lm_from_scratch.attention.sdpa import sdpa_attention
from lm_from_scratch.attention.visibility import Visibility
from lm_from_scratch.instruments.conformance import CASES, itself, oracle
from lm_from_scratch.models.gpt2 import SIZES


def arange(n: int, start: int = 0) -> torch.Tensor:
    return torch.arange(start, start + n)[None]


def tensors(B=2, H=3, T=7, S=7, D=5, dtype=torch.float64, scale=1.0, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return tuple(
        torch.randn(B, H, n, D, generator=generator, dtype=torch.float64).mul(scale).to(dtype)
        for n in (T, S, S)
    )


def visibility(name: str) -> Visibility:
    return CASES[name].visibility()


def test_weights_are_a_distribution_over_visible_keys() -> None:
    for case in CASES.values():
        q, k, _, _ = case.tensors(torch.float64)
        vis = case.visibility()
        weights = attention_weights(*(x.repeat(case.copies, 1, 1, 1) for x in (q, k)), vis)
        visible = vis.mask.expand_as(weights)
        assert (weights[~visible] == 0).all()
        rows = visible.any(-1)
        torch.testing.assert_close(weights.sum(-1), rows.double(), atol=1e-12, rtol=0)


def test_the_known_causal_case_is_the_lower_triangle() -> None:
    vis = visibility("causal, known")
    assert vis.is_causal
    assert torch.equal(vis.mask[0, 0], torch.ones(7, 7).tril().bool())
    assert not visibility("chunk after a cache").is_causal
    assert not visibility("window 3, known").is_causal


def test_chunk_mask_is_aligned_to_the_last_key_not_the_first() -> None:
    """SDPA's own ``is_causal`` is aligned to the first key: wrong after a cache."""
    vis = visibility("chunk after a cache")
    q, k, v = tensors(T=3)
    wrong = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    right = ATTENTION_KINDS["sdpa"](q, k, v, vis, 0.0)
    assert (wrong - right).abs().max() > 0.1


def test_hidden_scores_are_replaced_not_lowered() -> None:
    """With -10000 added to the scores, changing hidden keys changed real rows by 2.1."""
    q, k, v = tensors(scale=100.0, dtype=torch.float32)
    vis = visibility("left padding")
    other_k, other_v = k.clone(), v.clone()
    other_k[0, :, :2] *= -7.0
    other_v[0, :, :2] += 1000.0
    for kind in ATTENTION_KINDS.values():
        before, after = kind(q, k, v, vis, 0.0), kind(q, other_k, other_v, vis, 0.0)
        assert torch.equal(before[0, :, 2:], after[0, :, 2:])


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
    want = oracle(itself(positions.tolist(), window=window), q, k, v)
    for kind in ATTENTION_KINDS.values():
        torch.testing.assert_close(kind(q, k, v, vis, 0.0), want, atol=1e-12, rtol=0)


def test_switching_the_kind_is_one_call() -> None:
    model, idx = tiny_gpt2(), token_ids(2, 9)
    fused = model(idx)
    for kind in ATTENTION_KINDS:
        use_attention_(model, kind)
        with torch.no_grad():
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


@pytest.mark.parametrize("kind", ["formula", "sdpa"])
def test_dropout_zeroes_weights_and_keeps_the_mean(kind: str) -> None:
    torch.manual_seed(0)
    q, k, v = tensors(B=64, H=16)
    vis = Visibility(arange(7), arange(7))
    kept = ATTENTION_KINDS[kind](q, k, v, vis, 0.0)
    dropped = ATTENTION_KINDS[kind](q, k, v, vis, 0.5)
    first = dropped[:, :, 0] / kept[:, :, 0]  # the first query has one weight: 0 or doubled
    assert set(first.round().unique().tolist()) == {0.0, 2.0}
    assert 0.9 < first.mean() < 1.1


def test_repeat_kv_is_that_of_transformers() -> None:
    from transformers.models.qwen2.modeling_qwen2 import repeat_kv as theirs

    x = torch.randn(2, 3, 5, 4)
    for groups in (1, 2, 4):
        assert torch.equal(repeat_kv(x, 3 * groups), theirs(x, groups))


@pytest.mark.parametrize("kind", ATTENTION_KINDS)
@pytest.mark.parametrize("n_kv_head", [1, 2, 3, 6])
def test_grouped_heads_are_those_of_torch(kind: str, n_kv_head: int) -> None:
    q, k, v = tensors(H=6)
    k, v = k[:, :n_kv_head], v[:, :n_kv_head]
    want = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    ours = ATTENTION_KINDS[kind](q, k, v, visibility("causal, known"), 0.0)
    torch.testing.assert_close(ours, want, atol=1e-12, rtol=0)


def run(kind: str, q, k, v, vis: Visibility) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """The result, and its gradients where the kind has any on a CPU."""
    if kind == "flex":
        return ATTENTION_KINDS[kind](q, k, v, vis, 0.0), []
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    y = ATTENTION_KINDS[kind](*leaves, vis, 0.0)
    return y.detach(), list(torch.autograd.grad(y.square().sum(), leaves))


@pytest.mark.parametrize("kind", ATTENTION_KINDS)
def test_one_row_of_a_batch_never_moves_another(kind: str) -> None:
    for name in ("causal", "causal, known", "left padding", "packed documents, window"):
        vis = visibility(name)
        q, k, v = tensors()
        before, grads_before = run(kind, q, k, v, vis)
        for x in (q, k, v):
            x[0] = 3 * x[0].flip(0) + 1
        after, grads_after = run(kind, q, k, v, vis)
        assert not torch.equal(before[0], after[0])
        for a, b in zip([before, *grads_before], [after, *grads_after], strict=True):
            assert torch.equal(a[1], b[1]), name


@pytest.mark.parametrize("kind", ATTENTION_KINDS)
@pytest.mark.parametrize(
    "name", ["left padding", "right padding", "padding inside and on both sides"]
)
def test_the_content_of_padding_moves_nothing_and_gets_no_gradient(name: str, kind: str) -> None:
    vis = visibility(name)
    padding = (vis.query_positions < 0)[:, None, :].expand(2, 3, 7)
    q, k, v = tensors()
    before, grads_before = run(kind, q, k, v, vis)
    for x in (q, k, v):
        x[padding] = 1000.0
    after, grads_after = run(kind, q, k, v, vis)
    for a, b in zip([before, *grads_before], [after, *grads_after], strict=True):
        assert torch.equal(a, b)
        assert (b[padding] == 0).all()
        assert (b[~padding] != 0).any()


@pytest.mark.parametrize("kind", ["sdpa", "tiled"])
@pytest.mark.parametrize(("T", "window"), [(1, 1), (1, 3), (2, 3), (3, 1), (3, 4), (3, 5)])
def test_keys_too_old_for_the_first_query_are_not_read(kind: str, T: int, window: int) -> None:
    vis = Visibility(arange(T, 7 - T), arange(7), window=window, dense=True)
    q, k, v = tensors(T=T)
    want = ATTENTION_KINDS["formula"](q, k, v, vis, 0.0)
    old = 7 - T - window + 1
    k[:, :, :old] = v[:, :, :old] = torch.nan
    torch.testing.assert_close(ATTENTION_KINDS[kind](q, k, v, vis, 0.0), want, atol=1e-12, rtol=0)
    v[:, :, old] = torch.nan
    assert not ATTENTION_KINDS[kind](q, k, v, vis, 0.0).isfinite().all()


@pytest.mark.parametrize("kind", ATTENTION_KINDS)
def test_autocast_changes_nothing_for_tensors_that_are_low_precision(kind: str) -> None:
    q, k, v = tensors(scale=3.0, dtype=torch.bfloat16)
    vis = visibility("left padding")
    with torch.autocast("cpu", torch.bfloat16):
        inside = ATTENTION_KINDS[kind](q, k, v, vis, 0.0)
    assert torch.equal(inside, ATTENTION_KINDS[kind](q, k, v, vis, 0.0))


@pytest.mark.parametrize("kind", ATTENTION_KINDS)
def test_one_row_of_positions_and_documents_serves_every_row(kind: str) -> None:
    positions, documents = torch.tensor([[0, 1, 2, 0, 1, -1, -1]]), arange(7) // 3
    one = Visibility(positions, positions, documents, documents)
    each = Visibility(*(x.expand(2, -1) for x in (positions, positions, documents, documents)))
    q, k, v = tensors()
    y = ATTENTION_KINDS[kind](q, k, v, one, 0.0)
    assert torch.equal(y, ATTENTION_KINDS[kind](q, k, v, each, 0.0))
    torch.testing.assert_close(y, ATTENTION_KINDS["formula"](q, k, v, one, 0.0))


@pytest.mark.parametrize("kind", ["formula", "sdpa", "tiled"])
def test_shapes_alone_are_enough_on_the_meta_device(kind: str) -> None:
    q, k, v = (x.to("meta").requires_grad_() for x in tensors(dtype=torch.float32))
    positions = arange(7).to("meta")
    for dense in (True, False):
        vis = Visibility(positions, positions, window=3, dense=dense)
        y = ATTENTION_KINDS[kind](q, k, v, vis, 0.0)
        assert y.shape == q.shape
        y.sum().backward()


@pytest.mark.parametrize("kind", ATTENTION_KINDS)
def test_autocast_with_float32_tensors_runs(kind: str) -> None:
    q, k, v = tensors(dtype=torch.float32)
    vis = visibility("right padding")
    want = ATTENTION_KINDS[kind](q, k, v, vis, 0.0)
    with torch.autocast("cpu", torch.bfloat16):
        y = ATTENTION_KINDS[kind](q, k, v, vis, 0.0)
    torch.testing.assert_close(y.float(), want, atol=5e-2, rtol=0)


@pytest.mark.parametrize("kind", ATTENTION_KINDS)
def test_shapes_that_do_not_fit_are_refused_by_every_kind(kind: str) -> None:
    attend, vis = ATTENTION_KINDS[kind], visibility("causal")
    q, k, v = tensors()

    def refused(q, k, v, vis, match: str) -> None:
        with pytest.raises(ValueError, match=match):
            attend(q, k, v, vis, 0.0)

    refused(q[0], k, v, vis, r"q \(3, 7, 5\)")
    refused(q, k, v[:, :1], vis, r"k \(2, 3, 7, 5\), v \(2, 1, 7, 5\)")
    refused(q[:1], k, v, vis, r"q has \(B, D\) = \(1, 5\), k has \(2, 5\)")
    refused(q[..., :4], k, v, vis, r"\(2, 4\), k has \(2, 5\)")
    refused(q, k[:, :2], v[:, :2], vis, "3 query heads cannot share 2 key heads")
    refused(q[:, :, :6], k, v, vis, "6 queries and 7 keys, but the visibility is for 7 and 7")
    refused(q, k[:, :, :6], v[:, :, :6], vis, "7 queries and 6 keys, .* for 7 and 7")
    refused(*(x[:1] for x in (q, k, v)), visibility("left padding"), "q has 1 rows, .* has 2")
    check_shapes(q, k, v, Visibility(arange(7), arange(7)))  # one row of positions fits any batch


def test_a_window_that_hides_nothing_needs_no_mask() -> None:
    q, k, v = tensors()
    for window in (None, 7, 8, 99):
        vis = Visibility(arange(7), arange(7), window=window, dense=True)
        want = sdpa_attention(q, k, v, visibility("causal, known"))
        assert torch.equal(sdpa_attention(q, k, v, vis), want)
        assert vis._mask is None
    vis = Visibility(arange(7), arange(7), window=6, dense=True)
    assert not torch.equal(sdpa_attention(q, k, v, vis), want)


@pytest.mark.parametrize("hidden", [0, 4], ids=["all keys", "left padding"])
@pytest.mark.parametrize("S", [1, 33])
@pytest.mark.parametrize("shared", [1, 2, 4])
def test_one_query_in_bfloat16(shared: int, S: int, hidden: int) -> None:
    """Value, shape, dtype and gradients are the formula's."""
    q, k, v = (x.requires_grad_() for x in tensors(B=2, H=4, T=1, S=S, dtype=torch.bfloat16))
    shared_k, shared_v = k[:, ::shared], v[:, ::shared]  # so many query heads for each of them
    keys = arange(S).repeat(2, 1)
    keys[1, : min(hidden, S - 1)] = -1
    vis = Visibility(arange(1, S - 1), keys, dense=not hidden)
    y = sdpa_attention(q, shared_k, shared_v, vis)
    assert y.shape == q.shape and y.dtype == q.dtype
    want = ATTENTION_KINDS["formula"](q.double(), shared_k.double(), shared_v.double(), vis, 0.0)
    torch.testing.assert_close(y.double(), want, atol=0.02, rtol=0.02)
    grads = torch.autograd.grad(y.float().square().sum(), (q, k, v))
    wanted = torch.autograd.grad(want.square().sum(), (q, k, v))
    for ours, theirs in zip(grads, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, atol=0.1, rtol=0.05)
