"""Multi-token prediction: depths, targets, losses, and a drafter."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from mtp_layers import of_transformers
from since_qwen2.whole_models import (
    ROWS,
    Ideas,
    Laws,
    Rows,
    built,
    exact,
    near,
    twin_of,
)
from tiny_models import enlarge_, tiny_qwen2
from torch import Tensor

from lm_from_scratch.attention.visibility import Visibility
from lm_from_scratch.cache.interface import NO_CACHE
from lm_from_scratch.cache.slots import cache_for
from lm_from_scratch.generation.generate import complete, generate
from lm_from_scratch.generation.mtp_drafter import MTPDrafter, _SelfDraft
from lm_from_scratch.generation.sampling import GREEDY
from lm_from_scratch.generation.speculative import speculate
from lm_from_scratch.models import mtp as drafting
from lm_from_scratch.text import targets
from lm_from_scratch.text.batches import padded_batch
from lm_from_scratch.training import mtp_loss

# --------------------------------------------------------------------------------------------- laws

DEPTHS = 3


@cache
def drafted() -> tuple[dict[str, Tensor], list[Tensor], list[Tensor]]:
    """Weights of the layers, and the states of the model and of each depth in transformers."""
    from transformers.cache_utils import MtpCache

    model = built("qwen3")
    layers = drafting.MTP(model, DEPTHS).eval()
    enlarge_(layers, seed=9)
    made = of_transformers(twin_of("qwen3", model), layers)
    idx, states = torch.tensor(ROWS[:1]), []
    cache = MtpCache(config=made.config)
    with torch.no_grad():
        hidden = h = model.model(idx)
        for depth in range(1, DEPTHS + 1):
            known = F.pad(idx[:, depth:], (0, depth))
            hidden = made.forward_layer(
                depth - 1, hidden, torch.arange(12)[None] + depth, cache, input_ids=known
            )
            states.append(hidden)
    return copy.deepcopy(layers.state_dict()), [h], states


def drafter(model: Any, n_depth: int = DEPTHS) -> Any:
    layers = drafting.MTP(model, n_depth).eval()
    state = {n: t for n, t in drafted()[0].items() if int(n.split(".")[1]) < n_depth}
    layers.load_state_dict(state)
    return layers


@torch.no_grad()
def depths() -> None:
    model = built("qwen3")
    _, (h,), want = drafted()
    for found, state in zip(drafter(model)(model, h, torch.tensor(ROWS[:1])), want, strict=True):
        near(found, state)


@torch.no_grad()
def depths_in_pieces() -> None:
    model, idx = built("qwen3"), torch.tensor(ROWS[:1])
    layers, (h,), want = drafter(model), *drafted()[1:]
    for depth in range(1, DEPTHS + 1):
        cache, known = cache_for([layers.window]), F.pad(idx[:, depth:], (0, depth))
        pieces = zip(h.split([5, 1, 6], 1), known.split([5, 1, 6], 1), strict=True)
        found = [layers.step(model, depth, h, x, cache=cache) for h, x in pieces]
        h = torch.cat(found, dim=1)
        near(h, want[depth - 1])


@torch.no_grad()
def no_answer_is_seen() -> None:
    """Another token at place j changes the columns of depth d from j - d on, and no other."""
    model, idx = built("qwen3").double(), torch.tensor(ROWS[:1])
    layers = drafter(model)
    before = layers(model, model.model(idx), idx)
    for j in (4, 8):
        other = idx.clone()
        other[0, j] = idx[0, j] % 90 + 4
        after = layers(model, model.model(other), other)
        for depth, (x, y) in enumerate(zip(before, after, strict=True), 1):
            changed = (x - y).abs().amax(-1)[0] > 1e-9
            assert changed.tolist() == [i >= j - depth for i in range(12)]


def targets_by_definition() -> None:
    """In each document the token depth + 1 places on, if the document has it."""
    places = [-1, -1, *range(5), *range(1), *range(4)]
    idx, documents = torch.arange(12)[None], [[*range(2, 7)], [7], [*range(8, 12)]]
    for depth in range(5):
        want = [targets.IGNORE] * 2
        for row in documents:
            want += [(row + [targets.IGNORE] * (depth + 1))[t + depth + 1] for t in range(len(row))]
        found = mtp_loss.mtp_targets(idx, depth, positions=torch.tensor([places]))
        assert found[0].tolist() == want


def losses() -> None:
    """The mean of -log p over the columns whose document goes on, from the states of the depth;
    padding and documents count as rows alone."""
    model = built("qwen3").double()
    layers, batch = drafter(model), padded_batch(ROWS, 0, "left")
    states = [model.model(torch.tensor([row])) for row in ROWS]
    alone = [layers(model, h, torch.tensor([row])) for h, row in zip(states, ROWS, strict=True)]
    want = []
    for depth in range(1, DEPTHS + 1):
        terms = []
        for row, found in zip(ROWS, alone, strict=True):
            log_p = (found[depth - 1][0] @ model.head.weight.T).log_softmax(-1)
            terms += [-log_p[i, row[i + depth + 1]] for i in range(len(row) - depth - 1)]
        want.append(sum(terms) / len(terms))
    where = dict(positions=batch.positions)
    h = model.model(batch.idx, **where)
    exact(mtp_loss.mtp_losses(model, layers, h, batch.idx, **where), want)
    where = dict(
        positions=torch.tensor([[*range(12), *range(7)]]),
        documents=torch.tensor([[0] * 12 + [1] * 7]),
    )
    idx = torch.tensor([ROWS[0] + ROWS[1]])
    h = model.model(idx, **where)
    exact(mtp_loss.mtp_losses(model, layers, h, idx, **where), want)


@torch.no_grad()
def drafts() -> None:
    """Each draft is what the depths say to the whole row, without a cache; and the text is that of
    plain generation."""
    model = tiny_qwen2(
        vocab_size=7, n_layer=2, std=0.3
    ).double()  # few words: some drafts are right
    layers = drafting.MTP(model, 2).eval()
    enlarge_(layers)
    asked: list[Any] = []

    class Watched(MTPDrafter):
        def start(self, *given: Any) -> Any:
            inner = super().start(*given)

            def propose(rows: Any, wanted: Any, generators: Any) -> Any:
                found, q = inner(rows, wanted, generators)
                asked.append(([list(row) for row in rows], found))
                return found, q

            propose.hear = inner.hear  # type: ignore[attr-defined]
            return propose

    prompts = [[3, 5, 4, 6], [5, 3]]
    passes = list(speculate(model, Watched(layers), prompts, 12, GREEDY, 3))
    text = [[t for p in passes for t in p.tokens[i]] for i in range(2)]
    assert text == complete(generate(model, prompts, 12, GREEDY))
    for rows, found in asked:
        for row, some in zip(rows, found, strict=True):
            assert some == said(model, layers, row, len(some))
    assert len({n for p in passes for n in p.accepted}) > 1  # some are taken, some are not


def said(model: Any, layers: Any, row: list[int], n: int) -> list[int]:
    """``n`` drafts after a row from the whole row: depth 1, depth 2, and then depth 2 again."""
    h, drafts = model.model(torch.tensor([row[:-1]])), []
    for k in range(n):
        if k < 2:
            below, known = h, torch.tensor([(row + drafts)[k + 1 :]])
        else:
            below = torch.cat([below, h[:, -1:]], 1)
            known = torch.cat([known, torch.tensor([[drafts[-1]]])], 1)
        layer, at = layers.layers[min(k, 1)], torch.arange(known.shape[1])[None]
        seen, turn = Visibility(at, at), model.model.rotary_emb(at, h.dtype)
        h = layer(model.model.embed_tokens(known), below, turn, seen, NO_CACHE)
        drafts.append(int((h[:, -1] @ model.head.weight.T).argmax()))
    return drafts


LAWS: Laws = {
    "depths": depths,
    "pieces": depths_in_pieces,
    "no answer": no_answer_is_seen,
    "targets": targets_by_definition,
    "losses": losses,
    "drafts": drafts,
}

# ----------------------------------------------------------------------------------------- mistakes


def joined(
    parts: Callable[..., list[Tensor]] = lambda self, x, h: [self.enorm(x), self.hnorm(h)],
    last: Callable[..., Tensor] = lambda self, y, h: self.post_norm(y),
) -> Any:
    """One depth, given what is joined, and its end."""

    def forward(
        self: Any, x: Tensor, h: Tensor, rotation: Any, visibility: Any, cache: Any
    ) -> Tensor:
        u = self.eh_proj(torch.cat(parts(self, x, h), dim=-1))
        return last(self, self.mtp_block(u, rotation, visibility, cache), h)

    return forward


def in_a_chain(
    shift: Callable[[int], int] = lambda depth: depth,
    below: Callable[[Tensor, Tensor], Tensor] = lambda h, model_h: h,
    layer: Callable[[int], int] = lambda depth: depth,
    where: Callable[..., dict[str, Any]] = lambda p, d: dict(positions=p, documents=d),
) -> Any:
    """All depths, given the token that each knows, the state that it goes on from, its layer."""

    def forward(
        self: Any,
        model: Any,
        h: Tensor,
        idx: Tensor,
        *,
        positions: Any = None,
        documents: Any = None,
    ) -> list[Tensor]:
        states, start = [], h
        for depth in range(1, len(self.layers) + 1):
            n = shift(depth)
            known = F.pad(idx[:, n:], (0, min(n, idx.shape[1])))
            at = where(positions, documents)
            h = self.step(model, layer(depth), below(h, start), known, **at)
            states.append(h)
        return states

    return forward


def step_without(what: str) -> Any:
    def step(self: Any, *given: Any, step: Any = drafting.MTP.step, **how: Any) -> Tensor:
        return step(self, *given, **{name: v for name, v in how.items() if name != what})

    return step


def aimed(shift: int = 0, documents: bool = True, padding: bool = True) -> Any:
    def mtp_targets(idx: Tensor, depth: int, *, positions: Any = None) -> Tensor:
        if positions is not None and not documents:
            positions = torch.where(positions < 0, positions, torch.arange(idx.shape[1]))
        return targets.mtp_targets(idx, depth + shift, positions=positions if padding else None)

    return mtp_targets


def hears_padding(self: Any, states: Tensor, positions: Any, hear: Any = _SelfDraft.hear) -> None:
    hear(self, states, None)


def hears_drafts(
    self: Any, rows: Any, wanted: Any, generators: Any, call: Any = _SelfDraft.__call__
) -> Any:
    """The latest states are kept, whether or not their tokens were."""
    columns = [len(row) - 1 for row in rows]
    self.states = [
        s[len(s) - (n - start) :] if len(s) > n - start else s
        for s, n, start in zip(self.states, columns, self.first, strict=True)
    ]
    return call(self, rows, wanted, generators)


def keeps_drafted_columns(
    self: Any, rows: Any, wanted: Any, generators: Any, draft: Any = _SelfDraft._draft
) -> Any:
    for one in self.caches:
        one.crop = lambda length: None
    return draft(self, rows, wanted, generators)


def all_columns_final(
    self: Any, rows: Any, wanted: Any, generators: Any, call: Any = _SelfDraft.__call__
) -> Any:
    found = call(self, rows, wanted, generators)
    for i, row in enumerate(rows):
        self.states[i] = self.states[i][len(row) - 1 - self.first[i] :]
        self.first[i] = len(row) - 1
    return found


DEPTH, CHAIN, STEP = "models.mtp:MTPLayer.forward", "models.mtp:MTP.forward", "models.mtp:MTP.step"
AIM, DRAFT = "training.mtp_loss:mtp_targets", "generation.mtp_drafter:_SelfDraft"
SAME: Rows = [
    ("one depth", DEPTH, joined()),
    ("all depths", CHAIN, in_a_chain()),
    (
        "columns counted from their newest token",
        CHAIN,
        in_a_chain(
            where=lambda p, d: dict(
                positions=p if p is None or d is not None else torch.where(p < 0, p, p + 1),
                documents=d,
            )
        ),
    ),
    ("targets", AIM, aimed()),
]
MUTANTS: Rows = [
    (
        "the state first, then the embedding",
        DEPTH,
        joined(lambda self, x, h: [self.hnorm(h), self.enorm(x)]),
    ),
    ("the embedding not normed", DEPTH, joined(lambda self, x, h: [x, self.hnorm(h)])),
    ("the state not normed", DEPTH, joined(lambda self, x, h: [self.enorm(x), h])),
    ("one norm for both", DEPTH, joined(lambda self, x, h: [self.hnorm(x), self.hnorm(h)])),
    ("no norm before the head", DEPTH, joined(last=lambda self, y, h: y)),
    ("added to the state", DEPTH, joined(last=lambda self, y, h: self.post_norm(y + h))),
    ("each depth knows one token more, no more", CHAIN, in_a_chain(shift=lambda depth: 1)),
    ("the token of the column itself", CHAIN, in_a_chain(shift=lambda depth: depth - 1)),
    ("the answer", CHAIN, in_a_chain(shift=lambda depth: depth + 1)),
    ("all depths from the model's state", CHAIN, in_a_chain(below=lambda h, start: start)),
    ("one layer for all depths", CHAIN, in_a_chain(layer=lambda depth: 1)),
    (
        "documents forgotten",
        CHAIN,
        in_a_chain(where=lambda p, d: dict(positions=p if d is None else None)),
    ),
    (
        "padding forgotten",
        CHAIN,
        in_a_chain(where=lambda p, d: dict(positions=p if d is not None else None, documents=d)),
    ),
    ("pieces without their cache", STEP, step_without("cache")),
    ("targets one too near", AIM, aimed(shift=-1)),
    ("targets one too far", AIM, aimed(shift=1)),
    ("targets across documents", AIM, aimed(documents=False)),
    ("targets at padding", AIM, aimed(padding=False)),
    ("a drafter that hears padding", f"{DRAFT}.hear", hears_padding),
    ("a drafter that hears rejected drafts", f"{DRAFT}.__call__", hears_drafts),
    ("a drafter that keeps columns of drafts", f"{DRAFT}._draft", keeps_drafted_columns),
    ("a drafter that makes no column again", f"{DRAFT}.__call__", all_columns_final),
]


IDEAS: Ideas = {"multi-token prediction": (LAWS, SAME, MUTANTS)}
