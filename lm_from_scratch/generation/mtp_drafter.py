"""Drafts that a model makes for itself, with its layers for multi-token prediction.

After a pass over a row of L tokens, whose last one is new, the model's states are known for all but
that one. Depth 1 joins the last of them with the new token, and drafts the token after it. Depth 2
goes on from what depth 1 found, with that draft for its token, and so on. Where more drafts are
wanted than there are depths, the last depth goes on from itself.

Each depth has a cache, of columns. A column of depth d is final if the d tokens after its own are
in the row; one that was made of drafts is taken back before the next draft, and made again of what
the model has said. So the caches of all depths are cut to the columns that are final in the
deepest, and the model's states from there on are kept.

Source: DeepSeek-AI, *DeepSeek-V3 Technical Report*, 2024, arXiv:2412.19437; Li et al., *EAGLE:
Speculative Sampling Requires Rethinking Feature Uncertainty*, 2024, arXiv:2401.15077 (one layer
that goes on from itself).
"""

from dataclasses import dataclass

import torch
from torch import Generator, Tensor

from lm_from_scratch.attention.visibility import PADDING
from lm_from_scratch.cache.slots import cache_for
from lm_from_scratch.generation.generate import AHEAD
from lm_from_scratch.generation.sampling import Sampler, draw
from lm_from_scratch.generation.speculative import (
    Propose,
    continued,
    distribution,
    padded,
    seen_before,
    uniform,
)
from lm_from_scratch.models.interface import CausalLM
from lm_from_scratch.models.modes import evaluating
from lm_from_scratch.models.mtp import MTP
from lm_from_scratch.models.qwen2 import Qwen2ForCausalLM


@dataclass(frozen=True)
class MTPDrafter:
    """Drafts from the layers ``mtp`` of the model that is drafted for, drawn as its tokens are."""

    mtp: MTP

    def start(self, model: CausalLM, sampler: Sampler, longest: int, n_draft: int) -> Propose:
        """Proposes what the layers say. Raises ``ValueError`` for a model of another width."""
        width = model.config.n_embd
        if not isinstance(model, Qwen2ForCausalLM) or width != self.mtp.n_embd:
            raise ValueError(
                f"the layers were made for states of n_embd={self.mtp.n_embd}, the model is a "
                f"{type(model).__name__} with n_embd={width}"
            )
        return _SelfDraft(model, self.mtp, sampler, longest, n_draft)


class _SelfDraft:
    """What one generation has heard of its model, and the caches of the depths."""

    def __init__(
        self, model: Qwen2ForCausalLM, mtp: MTP, sampler: Sampler, longest: int, n_draft: int
    ) -> None:
        self.model, self.mtp, self.sampler = model, mtp, sampler
        self.n_depth, reserve = len(mtp.layers), min(longest, AHEAD)
        self.caches = [
            cache_for([mtp.window], reserve=reserve, slack=n_draft + self.n_depth)
            for _ in mtp.layers
        ]
        # of each row: states from some column on, and the number of that column
        self.states: list[Tensor] = []
        self.first: list[int] = []

    def hear(self, states: Tensor, positions: Tensor | None) -> None:
        """The model's states (B, T, C), where ``positions`` (B, T) are not those of padding."""
        if not self.states:
            self.states = [states[i, :0] for i in range(len(states))]
            self.first = [0] * len(states)
        for i, new in enumerate(states):
            if positions is not None:
                new = new[positions[i] >= 0]
            self.states[i] = torch.cat([self.states[i], new])

    def __call__(
        self, rows: list[list[int]], wanted: list[int], generators: list[Generator]
    ) -> tuple[list[list[int]], Tensor | None]:
        # all but the last token have been read; what was read after them are rejected drafts
        columns = [len(row) - 1 for row in rows]
        pairs = zip(self.states, columns, self.first, strict=True)
        self.states = [states[: n - first] for states, n, first in pairs]
        if not any(wanted):
            return [[] for _ in rows], None
        with evaluating(self.model), evaluating(self.mtp):
            drafts, q = self._draft(rows, wanted, generators)
        # the last columns of all depths but the first were made of drafts
        for i, n in enumerate(columns):
            final = max(self.first[i], n - (self.n_depth - 1))
            self.states[i] = self.states[i][final - self.first[i] :]
            self.first[i] = final
        return drafts, q

    def _draft(
        self, rows: list[list[int]], wanted: list[int], generators: list[Generator]
    ) -> tuple[list[list[int]], Tensor]:
        device = self.model.head.weight.device
        # of each row that wants drafts: the token after each new column, and the column's state
        after = [row[a + 1 :] if n else [] for row, a, n in zip(rows, self.first, wanted)]
        known, places = continued(after, self.first, "left", device)  # (B, T)
        states = [s if n else s[:0] for s, n in zip(self.states, wanted, strict=True)]
        h = padded(states, 0, "left")  # (B, T, C)
        for cache in self.caches:
            if cache.batch is not None:  # a row that wants no more has fewer columns
                first = torch.tensor(self.first, device=cache.lengths.device)
                cache.crop(first.minimum(cache.lengths))
        want = torch.tensor(wanted, device=device)
        seen = seen_before(rows, [[] for _ in rows], self.model.config.vocab_size)[:, 0].to(device)
        q: list[Tensor] = []
        drawn: list[Tensor] = []
        for k, u in enumerate(uniform(generators, wanted).unbind(dim=1)):
            depth = min(k + 1, self.n_depth)
            if k > 0:
                draft = drawn[-1][:, None]
                seen = seen.scatter(1, draft, True)
                if k < self.n_depth:  # one depth more for the same columns
                    known = torch.cat([known[:, 1:], draft], dim=1)
                else:  # a column more for the last depth
                    known, h, places = draft, h[:, -1:], places[:, -1:] + 1
            places = places.masked_fill(want[:, None] <= k, PADDING)
            cache = self.caches[depth - 1]
            h = self.mtp.step(self.model, depth, h, known, positions=places, cache=cache)
            logits = self.model.head(h[:, -1])  # (B, V)
            q.append(distribution(self.sampler, logits, seen))
            drawn.append(draw(q[-1].log(), u))
        tokens = torch.stack(drawn, dim=1).tolist()  # (B, K)
        drafts = [row[:n] for row, n in zip(tokens, wanted, strict=True)]
        return drafts, torch.stack(q, dim=1)
