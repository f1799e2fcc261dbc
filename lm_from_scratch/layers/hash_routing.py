r"""Routers of DeepSeek-V4: scores by a root, and experts by a table.

A score is :math:`s_e = \sqrt{\log(1 + e^{x \cdot r_e})}`, which has no upper end, as a sigmoid has.
Most layers choose the experts with the highest scores plus a bias, as
:mod:`~lm_from_scratch.layers.experts` says. In the first few there is no choice: a table names the
experts of each *token id*, and scores only weigh them. So a token visits the same experts there
from the first step of training to the last, and all are busy.

Both are given the ids beside the tokens. Shapes: N tokens, C features, V ids, E experts, k of a
token.

Source: DeepSeek-AI, *DeepSeek-V4*, 2026, section 2.1; by hash first: Roller et al., *Hash Layers
For Large Sparse Models*, 2021, arXiv:2106.04426.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from lm_from_scratch.layers.experts import Router, Routing, SigmoidRouter


def root_softplus(logits: Tensor) -> Tensor:
    """The scores of experts from ``logits`` (N, E)."""
    return F.softplus(logits).sqrt()


class ScoreRouter(SigmoidRouter):
    """The experts with the highest scores of the tokens ``x`` (N, C), whatever their ids ``idx``
    (N,) are."""

    def score(self, logits: Tensor) -> Tensor:
        """The scores of experts from ``logits`` (N, E)."""
        return root_softplus(logits)

    def forward(self, x: Tensor, idx: Tensor | None = None) -> Routing:
        return super().forward(x)


class HashRouter(Router):
    """The experts that the table ``tid2eid`` (V, k) names for the ids ``idx`` (N,); their scores
    for the tokens ``x`` (N, C), over their sum and times ``scale``, are the weights."""

    tid2eid: Tensor

    def __init__(
        self, n_embd: int, n_expert: int, top_k: int, vocab_size: int, scale: float = 1.0
    ) -> None:
        super().__init__(n_embd, n_expert, top_k)
        self.scale = scale
        visits = torch.arange(vocab_size * top_k).view(vocab_size, top_k)
        self.register_buffer("tid2eid", visits % n_expert)

    def forward(self, x: Tensor, idx: Tensor) -> Routing:
        work = torch.promote_types(x.dtype, torch.float32)
        logits, experts = F.linear(x.to(work), self.weight.to(work)), self.tid2eid[idx]
        weights = root_softplus(logits).gather(1, experts)
        weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
        return Routing(logits, experts, weights * self.scale)
