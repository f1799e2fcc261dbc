r"""A mixture of experts: many MLPs, of which each token visits a few.

A router scores the E experts for every token :math:`x`; the k best of them form the set
:math:`\mathcal{T}`, and their results are added up by weight. Experts that were not chosen are not
computed, so weights grow with E and work with k:

.. math::

   y = \sum_{e \in \mathcal{T}} w_e \, \mathrm{MLP}_e(x) + \mathrm{shared}(x)

Two routers are in use. One takes the softmax of the scores, chooses, and may divide the k weights
by their sum (Mixtral and Qwen3 do). The other takes the sigmoid of each score alone, adds a
correction bias *for the choice only*, which keeps all experts busy without a loss for it, and may
choose some groups of experts first (DeepSeek-V3):

.. math::

   s_e = \sigma(x \cdot r_e), \qquad
   \mathcal{T} = \text{the k largest } s_e + b_e, \qquad
   w_e = \gamma \, s_e / \textstyle\sum_{j \in \mathcal{T}} s_j

Of equal scores the expert with the lower number is chosen, on every device (``torch.topk`` leaves
it open). :func:`expert_sum` sorts the N * k visits by expert, so that each expert multiplies
contiguous rows once.

Names are those of published checkpoints (``gate`` is the router). Shapes: N tokens, C features, E
experts, k experts of a token, F width of an expert, G groups.

Sources: Shazeer et al., *Outrageously Large Neural Networks*, 2017, arXiv:1701.06538; Jiang et al.,
*Mixtral of Experts*, 2024, arXiv:2401.04088; Dai et al., *DeepSeekMoE*, 2024, arXiv:2401.06066
(shared experts); DeepSeek-AI, *DeepSeek-V3 Technical Report*, 2024, arXiv:2412.19437.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Annotated, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lm_from_scratch.layers.gated_mlp import PRODUCTS, GatedMLP
from lm_from_scratch.limits import Count, Limit

#: What a config says of the experts that a token visits.
TopK = Annotated[Count, Limit("exceeds n_expert={n_expert}", lambda k, n: k <= n, "n_expert")]


class Routing(NamedTuple):
    """Where N tokens go: the router's scores before softmax or sigmoid ``logits`` (N, E), the
    numbers of the ``experts`` (N, k), the best first, and their ``weights`` (N, k)."""

    logits: Tensor
    experts: Tensor
    weights: Tensor


def best(scores: Tensor, k: int) -> Tensor:
    """The indices (N, k) of the k largest of ``scores`` (N, E); of equal ones the first."""
    return scores.sort(dim=-1, descending=True, stable=True).indices[:, :k]


def softmax_routing(logits: Tensor, k: int, normalize: bool) -> Routing:
    """The k most probable experts of ``logits`` (N, E); with ``normalize`` their weights sum to 1.
    Probabilities are computed in float32 at least."""
    work = torch.promote_types(logits.dtype, torch.float32)
    probabilities = logits.softmax(dim=-1, dtype=work)
    experts = best(probabilities, k)
    weights = probabilities.gather(-1, experts)
    if normalize:
        weights = weights / weights.sum(dim=-1, keepdim=True)
    return Routing(logits, experts, weights)


def sigmoid_routing(
    logits: Tensor,
    bias: Tensor,
    k: int,
    normalize: bool = True,
    scale: float = 1.0,
    n_group: int = 1,
    top_group: int = 1,
    score: Callable[[Tensor], Tensor] = torch.sigmoid,
) -> Routing:
    """The k experts of ``logits`` (N, E) with the largest sigmoid, or another ``score``, plus
    ``bias`` (E,); the bias does not enter the weights, which are multiplied by ``scale``.

    Of ``n_group`` equal groups of neighbouring experts only the ``top_group`` best can be chosen
    from: a group is worth the sum of its two best experts.
    """
    scores = score(logits)
    for_choice = scores.detach() + bias
    if n_group > 1:
        groups = for_choice.unflatten(-1, (n_group, -1))  # (N, G, E / G)
        worth = groups.topk(2, dim=-1).values.sum(dim=-1)  # (N, G)
        open_ = torch.zeros_like(worth, dtype=torch.bool).scatter(1, best(worth, top_group), True)
        for_choice = groups.masked_fill(~open_[..., None], -torch.inf).flatten(1)
    experts = best(for_choice, k)
    weights = scores.gather(-1, experts)
    if normalize:
        weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
    return Routing(logits, experts, weights * scale)


def routed_sum(
    x: Tensor, routing: Routing, experts: Sequence[Callable[[Tensor], Tensor]]
) -> Tensor:
    """The weighted sum (N, C) of what the ``experts`` of each token say of ``x`` (N, C). Each is
    called once, with the tokens that visit it."""
    k, visits = routing.experts.shape[1], routing.experts.flatten()  # (N k)
    order = visits.argsort(stable=True)  # by expert
    counts = torch.bincount(visits, minlength=len(experts)).tolist()
    rows = x[order // k].split(counts)
    y = torch.cat(
        [
            expert(some)
            for some, expert in zip(rows, experts, strict=True)
            if len(some) or not len(x)
        ]
    )
    y = y[order.argsort()].unflatten(0, (-1, k))  # (N, k, C): by token again
    return (routing.weights.to(y.dtype)[:, None] @ y).squeeze(1)


def expert_sum(
    x: Tensor,
    routing: Routing,
    gate_up: Tensor,
    down: Tensor,
    product: Callable[[Tensor, Tensor], Tensor],
) -> Tensor:
    """:func:`routed_sum` of ``x`` (N, C) and gated MLPs: ``gate_up`` (E, 2F, C) and ``down`` (E, C,
    F) are the experts, ``product`` joins gate and up."""

    def expert(W1: Tensor, W2: Tensor, some: Tensor) -> Tensor:
        return F.linear(product(*F.linear(some, W1).chunk(2, dim=-1)), W2)

    # unbind, as a gradient is stacked once; indexing would add up E tensors as large as all experts
    maps = zip(gate_up.unbind(), down.unbind(), strict=True)
    return routed_sum(x, routing, [partial(expert, W1, W2) for W1, W2 in maps])


def check_groups(n_expert: int, top_k: int, n_group: int, top_group: int) -> None:
    """Raises ``ValueError`` for groups of unequal sizes, for groups of one expert, and for
    ``top_k`` experts that ``top_group`` groups do not have."""
    size, rest = divmod(n_expert, n_group)
    if rest or (n_group > 1 and size < 2):
        groups = "groups of 2 or more"
        raise ValueError(f"n_group={n_group} does not divide n_expert={n_expert} into {groups}")
    if not 1 <= top_group <= n_group or top_k > top_group * size:
        raise ValueError(
            f"top_group={top_group} groups of {size} have no top_k={top_k} experts in "
            f"n_group={n_group}"
        )


class Router(nn.Module):
    """A score for each expert: ``weight`` (E, C)."""

    top_k: int

    def __init__(self, n_embd: int, n_expert: int, top_k: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(n_expert, n_embd))
        nn.init.normal_(self.weight, 0.0, 0.02)
        self.top_k = top_k


class SoftmaxRouter(Router):
    """:func:`softmax_routing` of tokens (N, C)."""

    def __init__(self, n_embd: int, n_expert: int, top_k: int, normalize: bool) -> None:
        super().__init__(n_embd, n_expert, top_k)
        self.normalize = normalize

    def forward(self, x: Tensor) -> Routing:
        return softmax_routing(F.linear(x, self.weight), self.top_k, self.normalize)


class SigmoidRouter(Router):
    """:func:`sigmoid_routing` of tokens (N, C), scored in float32 at least. The correction bias
    (E,) has no gradient: it is moved from outside, by
    :func:`~lm_from_scratch.training.balance.balanced_bias`, in steps that 16 bits would lose. So it
    stays in float32 where the model goes to half precision."""

    e_score_correction_bias: Tensor

    def __init__(
        self,
        n_embd: int,
        n_expert: int,
        top_k: int,
        normalize: bool = True,
        scale: float = 1.0,
        n_group: int = 1,
        top_group: int = 1,
    ) -> None:
        super().__init__(n_embd, n_expert, top_k)
        check_groups(n_expert, top_k, n_group, top_group)
        self.normalize, self.scale, self.n_group, self.top_group = (
            normalize,
            scale,
            n_group,
            top_group,
        )
        self.register_buffer("e_score_correction_bias", torch.zeros(n_expert))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        before = self.e_score_correction_bias
        super()._apply(fn, recurse)
        after = self.e_score_correction_bias
        if torch.promote_types(after.dtype, torch.float32) != after.dtype:
            self.e_score_correction_bias = before.to(after.device, torch.float32)
        return self

    def score(self, logits: Tensor) -> Tensor:
        """The scores of experts from ``logits`` (N, E)."""
        return logits.sigmoid()

    def forward(self, x: Tensor) -> Routing:
        work = torch.promote_types(x.dtype, torch.float32)
        logits = F.linear(x.to(work), self.weight.to(work))
        bias = self.e_score_correction_bias.to(work)
        how = self.normalize, self.scale, self.n_group, self.top_group, self.score
        return sigmoid_routing(logits, bias, self.top_k, *how)


class Experts(nn.Module):
    """E gated MLPs without biases, stacked, for tokens ``x`` (N, C): ``gate_up_proj`` (E, 2F, C)
    and ``down_proj`` (E, C, F)."""

    def __init__(
        self, n_expert: int, n_embd: int, expert_size: int, activation: str = "silu"
    ) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.empty(n_expert, 2 * expert_size, n_embd))
        self.down_proj = nn.Parameter(torch.empty(n_expert, n_embd, expert_size))
        for parameter in (self.gate_up_proj, self.down_proj):
            nn.init.normal_(parameter, 0.0, 0.02)
        self.product = PRODUCTS[activation]

    def forward(self, x: Tensor, routing: Routing) -> Tensor:
        """:func:`expert_sum` of ``x`` (N, C)."""
        return expert_sum(x, routing, self.gate_up_proj, self.down_proj, self.product)


class MixtureOfExperts(nn.Module):
    """A router and its experts instead of an MLP, for ``x`` (..., C). The router is given whatever
    else it looks at, (N, ...). Raises ``ValueError`` if a token is to visit more experts than there
    are."""

    def __init__(self, gate: Router, experts: Experts) -> None:
        super().__init__()
        if not 1 <= gate.top_k <= len(gate.weight):
            raise ValueError(f"top_k={gate.top_k} must be at least 1, at most {len(gate.weight)}")
        self.gate, self.experts = gate, experts

    def forward(self, x: Tensor, *beside: Tensor) -> Tensor:
        tokens = x.flatten(0, -2)  # (N, C)
        return self.experts(tokens, self.gate(tokens, *beside)).view_as(x)


class SharedExperts(MixtureOfExperts):
    """And an MLP that all tokens visit: as wide as several experts, as DeepSeek-V3 has it."""

    def __init__(self, gate: Router, experts: Experts, shared: GatedMLP) -> None:
        super().__init__(gate, experts)
        self.shared_experts = shared

    def forward(self, x: Tensor, *beside: Tensor) -> Tensor:
        return super().forward(x, *beside) + self.shared_experts(x)


class GatedSharedExpert(MixtureOfExperts):
    """And an MLP that all tokens visit, as strongly as a gate of their own says: Qwen2-MoE and
    Qwen3-Next."""

    def __init__(self, gate: Router, experts: Experts, shared: GatedMLP) -> None:
        super().__init__(gate, experts)
        self.shared_expert = shared
        self.shared_expert_gate = nn.Linear(gate.weight.shape[1], 1, bias=False)

    def forward(self, x: Tensor, *beside: Tensor) -> Tensor:
        shared = self.shared_expert_gate(x).sigmoid() * self.shared_expert(x)
        return super().forward(x, *beside) + shared


def active_parameters(model: nn.Module) -> int:
    """How many parameters one token meets: of the routed experts of each layer, k of E."""
    idle = 0
    for layer in model.modules():
        for router in layer.children():
            if isinstance(router, Router):
                E = len(router.weight)
                experts = layer.get_submodule("experts")
                of_experts = sum(p.numel() for p in experts.parameters())
                idle += of_experts // E * (E - router.top_k)
    return sum(p.numel() for p in model.parameters()) - idle
