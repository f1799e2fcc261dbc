"""conformance.py: every kind on every case; and the matrix itself finds wrong kinds."""

import pytest
import torch
import torch.nn.functional as F
from conformance_bounds import bound
from torch import Tensor

from lm_from_scratch.attention.attention import formula_attention
from lm_from_scratch.attention.kinds import ATTENTION_KINDS
from lm_from_scratch.attention.sdpa import sdpa_attention
from lm_from_scratch.attention.visibility import Visibility
from lm_from_scratch.instruments.conformance import (
    CASES,
    DTYPES,
    Case,
    Cell,
    itself,
    matrix,
    oracle,
)

NO_DROPOUT = "attention has no dropout"
NO_BACKWARD = "no backward pass on a CPU"
ORDER = "stands where packed attention needs"


def expected_refusal(kind: str, case: str) -> str:
    """What a kind says to a case, or nothing where it must compute it."""
    if case == "dropout" and kind in ("tiled", "flex", "packed"):
        return NO_DROPOUT
    if kind == "packed" and (case.startswith("keys in any order") or case.startswith("queries b")):
        return ORDER
    return NO_BACKWARD if kind == "flex" else ""


each_dtype = pytest.mark.parametrize(
    "dtype",
    [pytest.param(dtype, marks=[pytest.mark.slow] * (dtype != torch.float32)) for dtype in DTYPES],
    ids=str,
)


@each_dtype
def test_the_whole_matrix(dtype: torch.dtype) -> None:
    state = torch.get_rng_state()
    cells = list(matrix(dtypes=[dtype]))
    assert torch.equal(torch.get_rng_state(), state)
    assert len(cells) == len(CASES) * len(ATTENTION_KINDS)
    for cell in cells:
        refusal = expected_refusal(cell.kind, cell.case)
        assert (refusal in cell.unsupported) if refusal else cell.unsupported is None, str(cell)
        assert (cell.forward is None) == (refusal in (NO_DROPOUT, ORDER)), str(cell)
        assert (cell.gradient is None) == bool(refusal), str(cell)
        for error in (cell.forward, cell.gradient):
            assert error is None or error <= bound(cell), str(cell)
            if error is not None and cell.case == "dropout":
                assert error > 1e-4, f"{cell}: nothing was dropped"


@each_dtype
def test_results_have_the_shape_and_dtype_of_the_queries_and_the_width_of_the_values(dtype) -> None:
    for name, case in CASES.items():
        q, k, v, _ = case.tensors(dtype)
        q, k, v = (x.repeat(case.copies, 1, 1, 1) for x in (q, k, v))
        for kind, attend in ATTENTION_KINDS.items():
            if expected_refusal(kind, name) in ("", NO_BACKWARD):
                y = attend(q, k, v, case.visibility(), 0.0)
                assert (y.shape, y.dtype) == ((*q.shape[:3], v.shape[3]), dtype), (kind, name)


@each_dtype
def test_rows_that_see_no_key_are_exactly_zero(dtype: torch.dtype) -> None:
    found = 0
    for name, case in CASES.items():
        visible = case.visibility().mask.any(-1)  # (B, 1, T)
        if visible.all():
            continue
        q, k, v, _ = case.tensors(dtype)
        for kind, attend in ATTENTION_KINDS.items():
            if expected_refusal(kind, name) in ("", NO_BACKWARD):
                y = attend(q, k, v, case.visibility(), 0.0)
                assert (y[~visible.expand(y.shape[:3])] == 0).all(), (kind, name)
                found += 1
    assert found > 33


def test_the_rule_of_the_oracle_is_the_rule_of_the_package() -> None:
    for name, case in CASES.items():
        if case.copies > 1:
            continue
        mask = case.visibility().mask[:, 0].expand(len(case.queries), -1, -1)
        loops = [
            [[case.visible(b, t, s) for s in range(mask.shape[2])] for t in range(mask.shape[1])]
            for b in range(mask.shape[0])
        ]
        assert mask.tolist() == loops, name


def test_the_oracle_by_hand() -> None:
    """Queries of 0 weigh all visible keys alike."""
    v = torch.tensor([[[[1.0], [10.0], [100.0], [1000.0]]]])
    k, q = v, torch.zeros(1, 1, 4, 1)

    def weighted(case: Case) -> object:
        return pytest.approx(oracle(case, q, k, v).flatten().tolist(), abs=1e-12)

    assert weighted(itself([[0, 1, 2, 3]])) == [1, 5.5, 37, 1111 / 4]
    assert weighted(itself([[0, 1, 2, 3]], window=2)) == [1, 5.5, 55, 550]
    assert weighted(itself([[-1, 0, -1, 1]])) == [0, 10, 0, 505]
    assert weighted(itself([[0, 1, 0, 1]], [[0, 0, 1, 1]])) == [1, 5.5, 100, 550]
    grouped = oracle(
        itself([[0]]), torch.zeros(1, 4, 1, 1), torch.zeros(1, 2, 1, 1), torch.ones(1, 2, 1, 1)
        * torch.tensor([3.0, 7.0]).view(1, 2, 1, 1),
    )  # fmt: skip
    assert grouped.flatten().tolist() == [3, 3, 7, 7]


# Wrong kinds, each a mistake that was really made somewhere.


def top_left(q: Tensor, k: Tensor, v: Tensor, vis: Visibility, dropout: float = 0.0) -> Tensor:
    if not vis.hides_only_the_future:
        return formula_attention(q, k, v, vis, dropout)
    return F.scaled_dot_product_attention(
        q, k, v, is_causal=True, dropout_p=dropout, enable_gqa=True
    )


def one_key_more(q: Tensor, k: Tensor, v: Tensor, vis: Visibility, dropout: float = 0.0) -> Tensor:
    return formula_attention(q, k, v, vis.within(vis.window and vis.window + 1), dropout)


def heads_tiled(q: Tensor, k: Tensor, v: Tensor, vis: Visibility, dropout: float = 0.0) -> Tensor:
    groups = q.shape[1] // k.shape[1]
    return formula_attention(q, k.repeat(1, groups, 1, 1), v.repeat(1, groups, 1, 1), vis, dropout)


def causal_alone(q: Tensor, k: Tensor, v: Tensor, vis: Visibility, dropout: float = 0.0) -> Tensor:
    T, S = q.shape[2], k.shape[2]
    dense = Visibility(torch.arange(S - T, S)[None], torch.arange(S)[None], window=vis.window)
    return formula_attention(q, k, v, dense, dropout)


def nan_rows(q: Tensor, k: Tensor, v: Tensor, vis: Visibility, dropout: float = 0.0) -> Tensor:
    scores = (q @ k.repeat_interleave(q.shape[1] // k.shape[1], 1).mT) / q.shape[-1] ** 0.5
    weights = scores.masked_fill(~vis.mask, -torch.inf).softmax(-1)
    return F.dropout(weights, dropout) @ v.repeat_interleave(q.shape[1] // k.shape[1], 1)


def never_drops(q: Tensor, k: Tensor, v: Tensor, vis: Visibility, dropout: float = 0.0) -> Tensor:
    return sdpa_attention(q, k, v, vis, 0.0)


def no_gradient_of_keys(
    q: Tensor, k: Tensor, v: Tensor, vis: Visibility, dropout: float = 0.0
) -> Tensor:
    return formula_attention(q, k.detach() + 0 * k, v, vis, dropout)


def test_the_matrix_finds_wrong_kinds() -> None:
    wrong = [
        top_left, one_key_more, heads_tiled, causal_alone, nan_rows, never_drops,
        no_gradient_of_keys,
    ]  # fmt: skip
    caught: dict[str, set[str]] = {attend.__name__: set() for attend in wrong}
    for cell in matrix({attend.__name__: attend for attend in wrong}, dtypes=[torch.float64]):
        forward_is_right = cell.forward is not None and cell.forward <= bound(cell)
        gradient_is_right = cell.gradient is not None and cell.gradient <= bound(cell)
        dropped = cell.case != "dropout" or (cell.forward or 0.0) > 1e-4
        if not (forward_is_right and gradient_is_right and dropped):
            caught[cell.kind].add(cell.case)
    assert {"one query after a cache", "chunk after a cache"} <= caught["top_left"]
    assert {"window 1", "chunk, window", "one query, window"} <= caught["one_key_more"]
    assert caught["heads_tiled"] >= {"grouped heads", "grouped heads, known"}
    assert "one key head" not in caught["heads_tiled"]
    assert {"left padding", "packed documents", "keys in any order"} <= caught["causal_alone"]
    assert "a row of padding alone" in caught["nan_rows"]
    assert caught["never_drops"] == {"dropout"}
    assert "causal" in caught["no_gradient_of_keys"]
    for kind, cases in caught.items():
        assert kind == "no_gradient_of_keys" or "causal" not in cases


def test_a_cell_prints_as_one_line() -> None:
    cell = Cell("flex", "causal", torch.float32, 2e-7, None, "no backward")
    assert str(cell).split() == ["flex", "causal", "float32", "2.0e-07", "-", "no", "backward"]
