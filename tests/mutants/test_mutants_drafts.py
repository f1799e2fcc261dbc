"""Multi-token prediction: depths, targets, losses, and a drafter."""

import pytest
from mutation import Mutant, killer, laws_in, mutants

pytestmark = pytest.mark.slow

DRAFTS = "drafts_are|generation_is|column"
LAWS = laws_in("unit/models/test_mtp.py") | laws_in(
    "unit/generation/test_mtp_drafter.py", names=DRAFTS, most=2
)

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
