"""Multi-token prediction: depths, targets, losses, and a drafter."""

import copy
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from model_laws import BATCH, ROWS, exact, load, near, twin_of
from mtp_layers import of_transformers
from mutation import Mutant, killer, mutants
from tiny_models import enlarge_, tiny_qwen2
from torch import Tensor

from lm_from_scratch.attention.visibility import Visibility
from lm_from_scratch.cache.interface import NO_CACHE
from lm_from_scratch.cache.slots import cache_for
from lm_from_scratch.generation.generate import complete, generate
from lm_from_scratch.generation.mtp_drafter import MTPDrafter
from lm_from_scratch.generation.sampling import GREEDY
from lm_from_scratch.generation.speculative import speculate
from lm_from_scratch.models.mtp import MTP
from lm_from_scratch.text.targets import IGNORE, mtp_targets
from lm_from_scratch.training.mtp_loss import mtp_losses

DEPTHS, IDX = 3, torch.tensor(ROWS[:1])


@cache
def oracle() -> tuple[dict[str, Tensor], Tensor, list[Tensor]]:
    """Weights of the layers, and the states of the model and of each depth in transformers."""
    from transformers.cache_utils import MtpCache

    model = load("qwen3")
    layers = MTP(model, DEPTHS).eval()
    enlarge_(layers, seed=9)
    twin, states = of_transformers(twin_of("qwen3", model), layers), []
    cache = MtpCache(config=twin.config)
    with torch.no_grad():
        hidden = h = model.model(IDX)
        for depth in range(1, DEPTHS + 1):
            known, positions = F.pad(IDX[:, depth:], (0, depth)), torch.arange(12)[None] + depth
            hidden = twin.forward_layer(depth - 1, hidden, positions, cache, input_ids=known)
            states.append(hidden)
    return copy.deepcopy(layers.state_dict()), h, states


def loaded() -> tuple[Any, MTP]:
    """A model and its layers with their weights, as the code is now."""
    model = load("qwen3")
    layers = MTP(model, DEPTHS).eval()
    layers.load_state_dict(oracle()[0])
    return model, layers


@torch.no_grad()
def depths() -> None:
    (model, layers), (_, h, states) = loaded(), oracle()
    near(layers(model, h, IDX), states)


@torch.no_grad()
def depths_in_pieces() -> None:
    (model, layers), (_, h, states) = loaded(), oracle()
    for depth in range(1, DEPTHS + 1):
        cache, known = cache_for([layers.window]), F.pad(IDX[:, depth:], (0, depth))
        pieces = zip(h.split([5, 1, 6], 1), known.split([5, 1, 6], 1), strict=True)
        h = torch.cat([layers.step(model, depth, h, x, cache=cache) for h, x in pieces], dim=1)
        near(h, states[depth - 1])


@torch.no_grad()
def no_answer_is_seen() -> None:
    """Another token at place j changes the columns of depth d from j - d on, and no other."""
    model, layers = (module.double() for module in loaded())
    before = layers(model, model.model(IDX), IDX)
    for j in (4, 8):
        other = IDX.clone()
        other[0, j] = IDX[0, j] % 90 + 4
        after = layers(model, model.model(other), other)
        for depth, (x, y) in enumerate(zip(before, after, strict=True), 1):
            changed = (x - y).abs().amax(-1)[0] > 1e-9
            assert changed.tolist() == [i >= j - depth for i in range(12)]


def targets_by_definition() -> None:
    """In each document the token depth + 1 places on, if the document has it."""
    positions = torch.tensor([[-1, -1, *range(5), *range(1), *range(4)]])
    idx, documents = torch.arange(12)[None], [[*range(2, 7)], [7], [*range(8, 12)]]
    for depth in range(5):
        expected = [IGNORE] * 2
        for row in documents:
            expected += [*row[depth + 1 :], *[IGNORE] * min(depth + 1, len(row))]
        assert mtp_targets(idx, depth, positions=positions)[0].tolist() == expected


def losses() -> None:
    """The mean of -log p over the columns whose document goes on, from the states of the depth;
    padding and documents count as rows alone."""
    model, layers = (module.double() for module in loaded())
    rows = [torch.tensor([row]) for row in ROWS]
    states = [layers(model, model.model(row), row) for row in rows]
    expected = []
    for depth in range(1, DEPTHS + 1):
        terms = []
        for row, of_row in zip(ROWS, states, strict=True):
            log_p = (of_row[depth - 1][0] @ model.head_weight.T).log_softmax(-1)
            terms += [-log_p[i, row[i + depth + 1]] for i in range(len(row) - depth - 1)]
        expected.append(sum(terms) / len(terms))
    places = torch.tensor([[*range(12), *range(7)]])
    packed = dict(positions=places, documents=torch.tensor([[0] * 12 + [1] * 7]))
    for idx, where in (
        (BATCH.idx, dict(positions=BATCH.positions)),
        (torch.tensor([ROWS[0] + ROWS[1]]), packed),
    ):
        exact(mtp_losses(model, layers, model.model(idx, **where), idx, **where), expected)


@torch.no_grad()
def drafts() -> None:
    """Each draft is what the depths say to the whole row, without a cache; and the text is that of
    plain generation."""
    model = tiny_qwen2(
        vocab_size=7, n_layer=2, std=0.3
    ).double()  # few words: some drafts are right
    layers = MTP(model, 2).eval()
    enlarge_(layers)
    calls: list[Any] = []

    class Watched(MTPDrafter):
        def start(self, *given: Any) -> Any:
            inner = super().start(*given)

            def propose(rows: Any, wanted: Any, generators: Any) -> Any:
                proposed, q = inner(rows, wanted, generators)
                calls.extend(zip([list(row) for row in rows], proposed, strict=True))
                return proposed, q

            propose.hear = inner.hear  # type: ignore[attr-defined]
            return propose

    prompts = [[3, 5, 4, 6], [5, 3]]
    passes = list(speculate(model, Watched(layers), prompts, 12, GREEDY, 3))
    text = [[t for p in passes for t in p.tokens[i]] for i in range(2)]
    assert text == complete(generate(model, prompts, 12, GREEDY))
    for row, proposed in calls:
        assert proposed == drafts_of(model, layers, row, len(proposed))
    assert len({n for p in passes for n in p.accepted}) > 1  # some are taken, some are not


def drafts_of(model: Any, layers: Any, row: list[int], n: int) -> list[int]:
    """``n`` drafts after a row from the whole row: depth 1, depth 2, and then depth 2 again."""
    h, drafts = model.model(torch.tensor([row[:-1]])), []
    for k in range(n):
        if k < 2:
            below, known = h, torch.tensor([(row + drafts)[k + 1 :]])
        else:
            below = torch.cat([below, h[:, -1:]], 1)
            known = torch.cat([known, torch.tensor([[drafts[-1]]])], 1)
        layer, at = layers.layers[min(k, 1)], torch.arange(known.shape[1])[None]
        visibility, rotation = Visibility(at, at), model.model.rotary_emb(at, h.dtype)
        h = layer(model.model.embed_tokens(known), below, rotation, visibility, NO_CACHE)
        drafts.append(int((h[:, -1] @ model.head_weight.T).argmax()))
    return drafts


LAWS = {
    "depths": depths, "pieces": depths_in_pieces, "no answer": no_answer_is_seen,
    "targets": targets_by_definition, "losses": losses, "drafts": drafts,
}  # fmt: skip

JOINED, BLOCK = "[self.enorm(x), self.hnorm(h)]", "self.mtp_block(u, rotation, visibility, cache)"
KNOWN = "F.pad(idx[:, depth:], (0, min(depth, idx.shape[1])))"
STEP = "self.step(model, depth, h, known, positions=positions, documents=documents)"
WHERE = "positions=positions, documents=documents"

MISTAKES = {
    "models.mtp:MTPLayer.forward": [
        ("the state first, then the embedding", JOINED, "[self.hnorm(h), self.enorm(x)]"),
        ("the embedding not normed", "self.enorm(x)", "x"),
        ("the state not normed", "self.hnorm(h)", "h"),
        ("one norm for both", "self.enorm(x)", "self.hnorm(x)"),
        ("no norm before the head", f"self.post_norm({BLOCK})", BLOCK),
        ("added to the state", BLOCK, f"{BLOCK} + h"),
    ],
    "models.mtp:MTP.forward": [
        ("each depth knows one token more, no more", KNOWN, "F.pad(idx[:, 1:], (0, 1))"),
        ("the token of the column itself", KNOWN, "F.pad(idx[:, depth - 1 :], (0, depth - 1))"),
        ("the answer", KNOWN, "F.pad(idx[:, depth + 1 :], (0, depth + 1))"),
        ("all depths from the model's state",
         f"h = {STEP}\n            states.append(h)", f"states.append({STEP})"),
        ("one layer for all depths", "self.step(model, depth,", "self.step(model, 1,"),
        ("documents forgotten", WHERE, "positions=positions if documents is None else None"),
        ("padding forgotten",
         WHERE, "positions=None if documents is None else positions, documents=documents"),
    ],
    "models.mtp:MTP.step": [
        ("pieces without their cache", "if h.shape", "cache = NO_CACHE\n        if h.shape"),
    ],
    "text.targets:mtp_targets": [
        ("targets one too near", "range(depth)", "range(depth - 1)"),
        ("targets one too far", "range(depth)", "range(depth + 1)"),
        ("targets across documents", "positions=positions)",
         "positions=None if positions is None else "
         "positions.where(positions < 0, torch.arange(idx.shape[1])))"),
        ("targets at padding", "positions=positions)", "positions=None)"),
    ],
    "generation.mtp_drafter:_SelfDraft.hear": [
        ("a drafter that hears padding", "if positions is not None", "if False"),
    ],
    "generation.mtp_drafter:_SelfDraft.__call__": [
        ("a drafter that hears rejected drafts",
         "[states[: n - first]", "[states[max(0, len(states) - n + first) :]"),
        ("a drafter that makes no column again",
         "max(self.first[i], n - (self.n_depth - 1))", "n"),
    ],
    "generation.mtp_drafter:_SelfDraft._draft": [
        ("a drafter that keeps columns of drafts",
         "cache.crop(first.minimum(cache.lengths))", "pass"),
    ],
}  # fmt: skip


@pytest.mark.parametrize("mutant", mutants(MISTAKES))
def test_a_law_finds_the_mistake(mutant: Mutant) -> None:
    assert killer(mutant, LAWS)
