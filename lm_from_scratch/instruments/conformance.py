r"""Every kind of attention on every kind of input, against one oracle.

The oracle is attention as plain loops in float64, with its own statement, in Python integers, of
what a query may see. :func:`matrix` runs each kind of
:data:`~lm_from_scratch.attention.kinds.ATTENTION_KINDS` on each of the :data:`CASES` in four
dtypes, forward and backward, and yields one :class:`Cell` after the other::

    for cell in matrix():
        print(cell)

Oracle and kind get the same inputs, already rounded to the dtype: an error is of the computation
alone. It is the largest difference, divided by the largest entry if that is above 1. Where a kind
refuses an input, the cell holds its own words.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lm_from_scratch.attention.kinds import ATTENTION_KINDS
from lm_from_scratch.attention.layer import AttentionFunction
from lm_from_scratch.attention.visibility import Visibility

DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)

Rows = list[list[int]]  # one integer for each token of each row


@dataclass(frozen=True, kw_only=True)
class Case:
    """Where queries and keys stand, and how they are drawn."""

    queries: Rows  # positions, -1 for padding
    keys: Rows
    query_documents: Rows | None = None
    key_documents: Rows | None = None
    window: int | None = None
    dense: bool = False  # tell the kind that nothing is hidden but the future
    n_head: int = 2
    n_kv_head: int = 2
    value_dim: int = 8  # Dv; queries and keys have 8 features
    scale: float = 1.0  # of queries and keys; scores grow with its square
    dropout: float = 0.0
    copies: int = 1  # of each row, over which the result is averaged

    def visible(self, b: int, t: int, s: int) -> bool:
        """May query ``t`` of row ``b`` see key ``s``? The rule, in integers."""
        query, key = self.queries[b][t], self.keys[b][s]
        if key == -1 or query == -1:  # padding
            return False
        if key > query:  # the future
            return False
        if self.window is not None and key <= query - self.window:  # too old
            return False
        if self.query_documents is None or self.key_documents is None:
            return True
        return self.query_documents[b][t] == self.key_documents[b][s]

    def visibility(self) -> Visibility:
        """The same, as attention is told it."""

        def rows(values: Rows) -> Tensor:
            if self.dense:  # as a model does: one row of positions for the whole batch
                values = values[:1]
            return torch.tensor(values).repeat(1 if self.dense else self.copies, 1)

        return Visibility(
            rows(self.queries),
            rows(self.keys),
            None if self.query_documents is None else rows(self.query_documents),
            None if self.key_documents is None else rows(self.key_documents),
            window=self.window,
            dense=self.dense,
        )

    def tensors(self, dtype: torch.dtype) -> tuple[Tensor, ...]:
        """Queries, keys, values, and a gradient of the result; the same at every call."""
        generator = torch.Generator().manual_seed(0)

        def draw(n_head: int, rows: Rows, scale: float, width: int = 8) -> Tensor:
            shape = len(rows), n_head, len(rows[0]), width
            x = torch.randn(shape, generator=generator, dtype=torch.float64)
            return (x * scale).to(dtype)

        return (
            draw(self.n_head, self.queries, self.scale),
            draw(self.n_kv_head, self.keys, self.scale),
            draw(self.n_kv_head, self.keys, 1.0, self.value_dim),
            draw(self.n_head, self.queries, 1.0, self.value_dim),
        )


def oracle(case: Case, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention (B, H, T, Dv) of q (B, H, T, D), k (B, Hkv, S, D) and v (B, Hkv, S, Dv) in float64:
    one row, one head, one query after the other."""
    q, k, v = q.double(), k.double(), v.double()
    B, H, T, D = q.shape
    Hkv, S = k.shape[1:3]
    results = []
    for b in range(B):
        for h in range(H):
            shared = h * Hkv // H  # the key head of this query head
            for t in range(T):
                keys = [s for s in range(S) if case.visible(b, t, s)]
                scores = k[b, shared, keys] @ q[b, h, t] / math.sqrt(D)
                results.append(scores.softmax(0) @ v[b, shared, keys])  # no key: a sum of nothing
    return torch.stack(results).view(B, H, T, -1)


def itself(rows: Rows, documents: Rows | None = None, **rest: Any) -> Case:
    """Self-attention: the queries are the keys."""
    return Case(queries=rows, keys=rows, query_documents=documents, key_documents=documents, **rest)


def count(n: int, start: int = 0) -> Rows:
    """Two rows of the positions ``start``, ``start + 1``, ..."""
    return [list(range(start, start + n))] * 2


LEFT = [[-1, -1, 0, 1, 2, 3, 4], [0, 1, 2, 3, 4, 5, 6]]
RIGHT = [[0, 1, 2, 3, -1, -1, -1], [0, 1, 2, 3, 4, 5, 6]]
INSIDE = [[-1, 0, 1, 2, -1, 3, -1], [0, -1, -1, 1, 2, 3, 4]]
PACKED = [[0, 1, 2, 0, 1, 0, 1], [0, 0, 1, 2, 3, 4, -1]]
DOCUMENTS = [[0, 0, 0, 1, 1, 2, 2], [0, 1, 1, 1, 1, 1, 1]]
RING = [[8, 9, 10, 3, 4, 5, 6, 7], [5, -1, -1, 0, 1, 2, 3, 4]]  # slot = position mod 8, or + 3

#: The cases by name.
CASES: dict[str, Case] = {
    "causal": itself(count(7)),
    "causal, known": itself(count(7), dense=True),
    "one token": itself(count(1), dense=True),
    "longer than a tile": itself([list(range(300))], n_head=1, n_kv_head=1),
    "longer than a tile, known, window": itself(
        [list(range(300))], n_head=1, n_kv_head=1, window=270, dense=True
    ),
    "window 1": itself(count(7), window=1),
    "window 2": itself(count(7), window=2),
    "window 3, known": itself(count(7), window=3, dense=True),
    "window of the length, known": itself(count(7), window=7, dense=True),
    "window above the length": itself(count(7), window=99),
    "window above the length, known": itself(count(7), window=99, dense=True),
    "grouped heads": itself(count(7), n_head=6, n_kv_head=3),
    "grouped heads, known": itself(count(7), n_head=6, n_kv_head=3, dense=True),
    "one key head": itself(count(7), n_head=3, n_kv_head=1),
    "narrow values": itself(count(7), value_dim=3),
    "wide values, grouped heads, known": itself(
        count(7), n_head=6, n_kv_head=3, value_dim=13, dense=True
    ),
    "narrow values, window, padding inside": itself(INSIDE, window=2, value_dim=5),
    "left padding": itself(LEFT),
    "left padding, window, grouped": itself(LEFT, window=2, n_head=4),
    "right padding": itself(RIGHT),
    "padding inside and on both sides": itself(INSIDE),
    "padding inside, window": itself(INSIDE, window=2),
    "packed documents": itself(PACKED, DOCUMENTS),
    "packed documents, window": itself(PACKED, DOCUMENTS, window=2),
    "one query after a cache": Case(queries=count(1, 6), keys=count(7), dense=True),
    "one query, window": Case(queries=count(1, 6), keys=count(7), dense=True, window=3),
    "one query, left padding": Case(queries=[[4], [6]], keys=LEFT, n_head=4),
    "one query, one key head, narrow values": Case(
        queries=count(1, 6), keys=count(7), dense=True, n_head=4, n_kv_head=1, value_dim=6
    ),
    "chunk after a cache": Case(queries=count(3, 4), keys=count(7), dense=True),
    "chunk, window": Case(queries=count(3, 4), keys=count(7), dense=True, window=2),
    "chunk, left padding": Case(queries=[row[4:] for row in LEFT], keys=LEFT),
    "chunk, padding inside, window": Case(
        queries=[row[3:] for row in INSIDE], keys=INSIDE, window=2
    ),
    "a row of padding alone": itself([[-1, -1, -1], [0, 1, 2]]),
    "queries before every key": Case(queries=[[0, 1, 4], [2, 3, 4]], keys=[[2, 3, 4], [2, 3, 4]]),
    "keys in any order": Case(queries=[[10], [5]], keys=RING),
    "keys in any order, window, chunk": Case(queries=[[9, 10], [4, 5]], keys=RING, window=4),
    "scores of some hundreds": itself(count(7), scale=15.0),
    "scores above float16": itself(LEFT, scale=200.0),
    "dropout": itself(count(5), dropout=0.5, copies=4000),
}


class Cell(NamedTuple):
    """One entry of the matrix: two errors, or why there are none."""

    kind: str
    case: str
    dtype: torch.dtype
    forward: float | None
    gradient: float | None
    unsupported: str | None  # what the kind said; a kind may have a forward and no gradient

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        errors = ["-" if x is None else f"{x:.1e}" for x in (self.forward, self.gradient)]
        columns = f"{self.kind:8}{self.case:35}{dtype:10}{errors[0]:9}{errors[1]:9}"
        return f"{columns}{self.unsupported or ''}".rstrip()


def largest_error(ours: Iterable[Tensor], wanted: Iterable[Tensor]) -> float:
    """The largest difference, relative to the largest entry of its tensor if that is above 1."""
    errors = [
        (x.double() - y).abs().max() / y.abs().max().clamp(min=1.0)
        for x, y in zip(ours, wanted, strict=True)
    ]
    return float(torch.stack(errors).max())  # of tensors: Python's max() can lose a NaN


def measure(
    attend: AttentionFunction, case: Case, dtype: torch.dtype, want: Tensor, gradients: list[Tensor]
) -> tuple[float | None, float | None, str | None]:
    """Errors beside ``want`` (B, H, T, Dv) and its ``gradients``: forward, gradient, and what the
    kind said if it refused."""
    q, k, v, upstream = case.tensors(dtype)

    def mean_result(*inputs: Tensor) -> Tensor:
        q, k, v = (x.repeat(case.copies, 1, 1, 1) for x in inputs)
        y = attend(q, k, v, case.visibility(), case.dropout)
        return y.unflatten(0, (case.copies, -1)).mean(0)

    forward = gradient = refusal = None
    try:
        with torch.no_grad():
            forward = largest_error([mean_result(q, k, v)], [want])
        leaves = [x.requires_grad_() for x in (q, k, v)]
        gradient = largest_error(
            torch.autograd.grad(mean_result(*leaves), leaves, upstream), gradients
        )
    except ValueError as error:
        refusal = str(error)
    return forward, gradient, refusal


def matrix(
    kinds: Mapping[str, AttentionFunction] = ATTENTION_KINDS,
    cases: Mapping[str, Case] = CASES,
    dtypes: Iterable[torch.dtype] = DTYPES,
) -> Iterator[Cell]:
    """Measure each kind on each case in each dtype. The random state of torch is left as it was."""
    for name, case in cases.items():
        for dtype in dtypes:
            q, k, v, upstream = case.tensors(dtype)
            leaves = [x.requires_grad_() for x in (q.double(), k.double(), v.double())]
            want = oracle(case, *leaves)
            gradients = list(torch.autograd.grad(want, leaves, upstream.double()))
            for kind, attend in kinds.items():
                with torch.random.fork_rng(devices=[]):
                    torch.manual_seed(0)
                    errors = measure(attend, case, dtype, want.detach(), gradients)
                yield Cell(kind, name, dtype, *errors)
