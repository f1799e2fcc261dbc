"""varlen.py: sequences end to end, aligned to the last key; and finding them in a padded batch."""

import inspect
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import lm_from_scratch.attention.varlen as module
from lm_from_scratch.attention.attention import formula_attention
from lm_from_scratch.attention.masks import positions_from_mask
from lm_from_scratch.attention.varlen import (
    fused_varlen_attention,
    packed_attention,
    varlen_attention,
)
from lm_from_scratch.attention.visibility import Visibility
from lm_from_scratch.instruments.conformance import CASES


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def loops(q, k, v, bounds_q, bounds_k, left: int | None, right: int = 0) -> torch.Tensor:
    """One query after the other. Query i of n and key j of m: j - (i + m - n) in [-left, right]."""
    out = torch.zeros_like(q)
    for (q0, q1), (k0, k1) in zip(pairwise(bounds_q), pairwise(bounds_k), strict=True):
        for t in range(q0, q1):
            place = (t - q0) + (k1 - k0) - (q1 - q0)
            keys = [
                s for s in range(k0, k1)
                if s - k0 <= place + right and (left is None or s - k0 >= place - left)
            ]  # fmt: skip
            for h in range(q.shape[1]):
                shared = h * k.shape[1] // q.shape[1]
                scores = k[keys, shared] @ q[t, h] / q.shape[2] ** 0.5
                out[t, h] = scores.softmax(0) @ v[keys, shared]
    return out


def cumulative(lengths: list[int]) -> torch.Tensor:
    return torch.tensor([0, *lengths]).cumsum(0)


@given(
    st.lists(
        st.tuples(st.integers(0, 5), st.integers(0, 7)).filter(lambda n: n[0] <= n[1]),
        min_size=1,
        max_size=4,
    ),
    st.sampled_from([(3, 3), (4, 2), (3, 1)]),
    st.one_of(st.none(), st.integers(1, 8)),
    st.integers(0, 10**6),
)
def test_varlen_equals_loops(lengths, heads, window, seed) -> None:
    """Any lengths: none, more keys than queries, and more queries than keys."""
    cu_q, cu_k = cumulative([n for n, _ in lengths]), cumulative([m for _, m in lengths])
    q = drawn(int(cu_q[-1]), heads[0], 5, seed=seed)
    k, v = (drawn(int(cu_k[-1]), heads[1], 5, seed=seed + i) for i in (1, 2))
    ours = varlen_attention(q, k, v, cu_q, cu_k, window)
    want = loops(q, k, v, cu_q.tolist(), cu_k.tolist(), window and window - 1)
    torch.testing.assert_close(ours, want, atol=1e-12, rtol=0)


def test_causality_is_aligned_to_the_last_key() -> None:
    q, k, v = drawn(2, 1, 4), drawn(5, 1, 4, seed=1), drawn(5, 1, 4, seed=2)
    y = varlen_attention(q, k, v, torch.tensor([0, 2]), torch.tensor([0, 5]))
    everything = formula_attention(
        q[1:].transpose(0, 1)[None], k.transpose(0, 1)[None], v.transpose(0, 1)[None],
        Visibility(torch.tensor([[4]]), torch.arange(5)[None]),
    )  # fmt: skip
    torch.testing.assert_close(y[1], everything[0, :, 0])
    top_left = v[0]  # what the first query would see, aligned to the first key
    assert (y[0] - top_left).abs().max() > 0.1


def test_a_sequence_never_sees_another() -> None:
    bounds = torch.tensor([0, 3, 3, 7])
    q, k, v = (drawn(7, 2, 4, seed=i) for i in range(3))
    before = varlen_attention(q, k, v, bounds, bounds)
    k[:3], v[:3] = 100.0, 1000.0
    after = varlen_attention(q, k, v, bounds, bounds)
    assert torch.equal(before[3:], after[3:])
    assert not torch.equal(before[:3], after[:3])


@pytest.mark.parametrize(
    ("cu_q", "cu_k", "match"),
    [
        ([0, 3], [0, 4], r"cu_seq_q=\[0, 3\] must rise from 0 to the number of tokens, 4"),
        ([1, 4], [0, 4], r"cu_seq_q=\[1, 4\]"),
        ([0, 3, 2, 4], [0, 1, 2, 4], r"cu_seq_q=\[0, 3, 2, 4\]"),
        ([0, 4], [0, 5], r"cu_seq_k=\[0, 5\]"),
        ([0, 4], [], r"cu_seq_k=\[\]"),
        ([0, 2, 4], [0, 4], "cu_seq_q is for 2 sequences, cu_seq_k for 1"),
    ],
)
def test_bad_boundaries_are_refused(cu_q: list, cu_k: list, match: str) -> None:
    x = drawn(4, 1, 2)
    with pytest.raises(ValueError, match=match):
        varlen_attention(x, x, x, torch.tensor(cu_q), torch.tensor(cu_k))


@pytest.mark.parametrize("window", [None, 1, 3])
def test_the_arguments_of_the_fused_kernel(window: int | None, monkeypatch) -> None:
    """The kernel needs a GPU. Here stands in for it what its documentation says it computes."""
    import torch.nn.attention.varlen as torchs

    signature = inspect.signature(torchs.varlen_attn)

    def by_its_documentation(*args, **kwargs):
        call = signature.bind(*args, **kwargs)
        call.apply_defaults()
        a = call.arguments
        for cu, longest in ((a["cu_seq_q"], a["max_q"]), (a["cu_seq_k"], a["max_k"])):
            assert cu.dtype == torch.int32
            assert longest == cu.diff().max()
        assert a["enable_gqa"] or a["query"].shape[1] == a["key"].shape[1]
        assert a["scale"] is None
        left, right = a["window_size"]
        assert right != -1
        return loops(
            a["query"], a["key"], a["value"], a["cu_seq_q"].tolist(), a["cu_seq_k"].tolist(),
            None if left == -1 else left, right,
        )  # fmt: skip

    monkeypatch.setattr(torchs, "varlen_attn", by_its_documentation)
    q, k, v = drawn(6, 4, 8), drawn(11, 2, 8, seed=1), drawn(11, 2, 8, seed=2)
    bounds_q, bounds_k = [0, 1, 6], [0, 4, 11]
    ours = fused_varlen_attention(q, k, v, bounds_q, bounds_k, window)
    want = varlen_attention(q, k, v, torch.tensor(bounds_q), torch.tensor(bounds_k), window)
    torch.testing.assert_close(ours, want, atol=1e-12, rtol=0)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("window", [None, 1, 3])
def test_the_fused_kernel_on_a_gpu(window: int | None) -> None:
    cu_q, cu_k = torch.tensor([0, 1, 6, 20]), torch.tensor([0, 4, 9, 23])
    q, k, v = drawn(20, 4, 64), drawn(23, 2, 64, seed=1), drawn(23, 2, 64, seed=2)
    want = varlen_attention(q, k, v, cu_q, cu_k, window)
    q, k, v = (x.cuda().bfloat16() for x in (q, k, v))
    ours = varlen_attention(q, k, v, cu_q.cuda(), cu_k.cuda(), window)
    torch.testing.assert_close(ours.cpu().double(), want, atol=3e-2, rtol=0)


def tokens_computed(vis: Visibility, monkeypatch, T: int, S: int, B: int) -> tuple[list, list]:
    calls = []

    def recording(q, k, v, cu_q, cu_k, window=None):
        calls.append((cu_q.tolist(), cu_k.tolist()))
        return varlen_attention(q, k, v, cu_q, cu_k, window)

    monkeypatch.setattr(module, "varlen_attention", recording)
    packed_attention(drawn(B, 2, T, 4), drawn(B, 2, S, 4), drawn(B, 2, S, 4), vis)
    return calls[0]


def test_padding_is_not_computed(monkeypatch) -> None:
    for name, want in {
        "left padding": ([0, 5, 12], [0, 5, 12]),
        "padding inside and on both sides": ([0, 4, 9], [0, 4, 9]),
        "packed documents": ([0, 3, 5, 7, 8, 13], [0, 3, 5, 7, 8, 13]),
        "chunk, left padding": ([0, 3, 6], [0, 5, 12]),
        "causal, known": ([0, 7, 14], [0, 7, 14]),
    }.items():
        vis = CASES[name].visibility()
        assert tokens_computed(vis, monkeypatch, vis.query_length, vis.key_length, 2) == want


def test_documents_that_take_turns_in_a_row() -> None:
    positions = torch.tensor([[0, 0, 1, 1, 2, 2, -1]])
    documents = torch.tensor([[5, 9, 5, 9, 9, 5, 5]])
    vis = Visibility(positions, positions, documents, documents)
    q, k, v = (drawn(1, 2, 7, 4, seed=i) for i in range(3))
    torch.testing.assert_close(packed_attention(q, k, v, vis), formula_attention(q, k, v, vis))


@pytest.mark.parametrize(
    ("queries", "keys", "match"),
    [
        ([[0, 1, 2]] * 2, [[0, 1, 2], [0, 2, 1]], "row 1: position 2 .* needs 1: the keys"),
        ([[0, 1, 3]] * 2, [[0, 1, 3]] * 2, "row 0: position 3 .* needs 2: the keys"),
        ([[0, 1, 1]] * 2, [[0, 1, 1]] * 2, "row 0: position 1 .* needs 2: the keys"),
        ([[3], [2]], [[0, 1, 2, 3]] * 2, "row 1: position 2 .* needs 3: the queries"),
        ([[4], [5]], [[0, 1, 2, 3, 4]] * 2, "row 1: position 5 .* needs 4: the queries"),
        ([[3, 2]] * 2, [[0, 1, 2, 3]] * 2, "row 0: position 3 .* needs 2: the queries"),
        ([[0, 1, 0, 1]] * 2, [[0, 1, 0, 1]] * 2, "row 0: position 0 .* needs 2: the keys"),
    ],
)
def test_what_it_would_get_wrong_is_refused(queries, keys, match: str) -> None:
    vis = Visibility(torch.tensor(queries), torch.tensor(keys))
    T, S = vis.query_length, vis.key_length
    with pytest.raises(ValueError, match=match):
        packed_attention(drawn(2, 1, T, 4), drawn(2, 1, S, 4), drawn(2, 1, S, 4), vis)


@given(st.integers(0, 10**6), st.integers(1, 3), st.integers(1, 4), st.integers(0, 5))
def test_whatever_it_accepts_is_right(seed: int, B: int, T: int, past: int) -> None:
    """Positions at random: either the answer of the formula or an error."""
    generator = torch.Generator().manual_seed(seed)
    keys = torch.randint(-1, 3, (B, T + past), generator=generator)
    queries = torch.randint(-1, 3, (B, T), generator=generator)
    documents = torch.randint(0, 3, (B, T + past), generator=generator)
    vis = Visibility(queries, keys, documents[:, past:], documents)
    q = drawn(B, 2, T, 4, seed=seed)
    k, v = (drawn(B, 1, T + past, 4, seed=seed + i) for i in (1, 2))
    try:
        ours = packed_attention(q, k, v, vis)
    except ValueError:
        return
    torch.testing.assert_close(ours, formula_attention(q, k, v, vis), atol=1e-12, rtol=0)


def test_chunks_after_a_padded_cache_with_a_row_that_is_over() -> None:
    mask = torch.tensor([[0, 1, 1, 1, 1], [1, 1, 1, 0, 0]])  # row 1 ended before the chunk
    keys = positions_from_mask(mask)
    vis = Visibility(keys[:, 3:], keys)
    q, k, v = drawn(2, 2, 2, 4), drawn(2, 2, 5, 4, seed=1), drawn(2, 2, 5, 4, seed=2)
    y = packed_attention(q, k, v, vis)
    torch.testing.assert_close(y, formula_attention(q, k, v, vis))
    assert (y[1] == 0).all()


def test_nothing_but_padding() -> None:
    positions = torch.full((2, 3), -1)
    q, k, v = (drawn(2, 2, 3, 4, seed=i).requires_grad_() for i in range(3))
    y = packed_attention(q, k, v, Visibility(positions, positions))
    assert (y == 0).all()
    y.sum().backward()
    assert (q.grad == 0).all()


def test_dropout_is_refused() -> None:
    q, k, v, _ = CASES["causal"].tensors(torch.float32)
    with pytest.raises(ValueError, match=r"packed attention has no dropout, but dropout=0\.1"):
        packed_attention(q, k, v, CASES["causal"].visibility(), 0.1)


def test_lengths_that_cannot_be_are_refused() -> None:
    q, k = torch.randn(5, 2, 8), torch.randn(5, 2, 8)
    cu = torch.tensor([0, 2, 5])
    with pytest.raises(ValueError, match=r"k has shape \(5, 2, 8\), v \(9, 2, 8\)"):
        varlen_attention(q, k, torch.randn(9, 2, 8), cu, cu)
    with pytest.raises(ValueError, match="window=0"):
        varlen_attention(q, k, k, cu, cu, window=0)
    with pytest.raises(ValueError, match="sequence 0 has 3 queries, but only 2 keys"):
        varlen_attention(q, k, k, torch.tensor([0, 3, 5]), cu)


def test_a_batch_of_padding_alone_is_zero_whatever_it_holds() -> None:
    nothing = torch.full((2, 4), -1)
    q = torch.full((2, 2, 4, 8), torch.nan, requires_grad=True)
    y = packed_attention(q, q, q, Visibility(nothing, nothing))
    y.sum().backward()
    assert (y == 0).all() and (q.grad == 0).all()
