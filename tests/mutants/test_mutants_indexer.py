"""The indexer: scores, choice, attention to what is chosen, and its loss."""

import pytest
from mutation import Mutant, killer, laws_in, mutants

pytestmark = pytest.mark.slow

LAWS = laws_in("unit/attention/test_indexer.py", "unit/models/test_indexed_attention.py", most=4)

LATEST = "visibility.key_positions.argsort(dim=-1, descending=True)"
KL = "torch.xlogy(p, p) - p * log_q.masked_fill(hidden, 0.0)"
INTERLEAVED = "from lm_from_scratch.layers.rope import apply_rope_interleaved as apply_rope"
TURNED = "apply_rope(x[..., :turning], *rotation), x[..., turning:]"

MISTAKES = {
    "attention.indexer:index_scores": [
        ("no relu", ".relu()", ""),
        ("relu of the sum", ", products)", ", q.to(work) @ k.to(work).mT).relu()"),
        ("weights of heads made positive", "weights.to(work)", "weights.to(work).abs()"),
        ("weights of heads by softmax", "weights.to(work)", "weights.to(work).softmax(-1)"),
        ("not divided by the root of J", "math.sqrt(D * J)", "math.sqrt(D)"),
    ],
    "attention.indexer:choose": [
        ("the earliest of equal scores", LATEST, "visibility.key_positions.argsort(dim=-1)"),
        ("topk, which leaves ties open", "ordered.sort(dim=-1, descending=True, stable=True)",
         "ordered.topk(ordered.shape[-1])"),
        ("the last column of equal scores, not the last position", LATEST,
         "torch.arange(visibility.key_length).flip(0).expand_as(visibility.key_positions)"),
        ("the lowest scores", "ordered.sort(", "(-ordered).sort("),
        ("chosen before keys are hidden", "scores.masked_fill(~seen, -math.inf)", "scores"),
        ("hidden keys fill empty places",
         "chosen.masked_fill(~seen.gather(-1, chosen), NO_KEY)", "chosen"),
    ],
    "attention.indexer:restrict": [
        ("an empty place is the last key", "% marks.shape[-1]", "% (marks.shape[-1] - 1)"),
    ],
    "models.indexed_attention:IndexedAttention.forward": [
        ("the choice is not used", "restrict(visibility, chosen)", "visibility"),
    ],
    "models.indexed_attention:Indexer.heads": [
        ("queries of the token, not of its latent",
         "self.wq_b(latent)", "self.wq_b(x[..., : latent.shape[2]])"),
        ("keys not normed", "self.k_norm(self.wk(x))", "self.wk(x)"),
        ("keys normed without their mean", "self.k_norm(self.wk(x))",
         "(nn.functional.rms_norm(self.wk(x), (self.head_dim,), self.k_norm.weight, 1e-6)"
         " + self.k_norm.bias)"),
        ("keys turned by their columns",  # which are the positions of the first row
         "self._turned(k, rotation)", "self._turned(k, tuple(angle[:1] for angle in rotation))"),
        ("the indexer's loss reaches the model", ".detach()", "", 2),
    ],
    "models.indexed_attention:Indexer._turned": [
        ("the last features turn",
         TURNED, "x[..., :-turning], apply_rope(x[..., -turning:], *rotation)"),
        ("pairs 2i and 2i + 1", "return torch.cat", f"{INTERLEAVED}\n        return torch.cat"),
        ("queries and keys not turned", TURNED, "x"),
    ],
    "attention.indexer:gathered_attention": [
        ("a chosen key that is hidden is read",
         "visibility.mask[:, 0].expand(B, T, -1).gather(-1, columns) & ", ""),
    ],
    "attention.indexer:indexer_loss": [
        ("the divergence the other way",
         KL, "log_q.exp() * (log_q - p.clamp(min=1e-9).log()) * (p > 0)"),
        ("cross-entropy alone", "torch.xlogy(p, p) - p", "-p"),
        ("padding counts", "~hidden.all(-1)", "torch.ones_like(divergence)"),
        ("hidden keys count",
         "scores.masked_fill(hidden, torch.finfo(scores.dtype).min)", "scores"),
        ("the loss reaches the weights", "weights.detach()", "weights"),
    ],
}  # fmt: skip


@pytest.mark.parametrize("mutant", mutants(MISTAKES))
def test_a_law_finds_the_mistake(mutant: Mutant) -> None:
    assert killer(mutant, LAWS)
