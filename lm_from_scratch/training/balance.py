r"""Keeping all experts of a mixture busy.

A router that prefers an expert trains it, and then prefers it more. Two remedies, both pure
functions of what :func:`record_routing` sees. One adds a loss: with :math:`f_e` visits of expert e
per token and :math:`P_e` its mean probability,

.. math::

   \mathcal{L} = E \sum_e f_e \, P_e

which is k where all experts are as busy. Its gradient pulls at the same weights as that of the
language. The other has no gradient: after each step, the bias that takes part in the choice alone
rises for experts below the mean and falls for those above,

.. math::

   b_e \leftarrow b_e + u \, \mathrm{sign}(\bar{c} - c_e)

How uneven a layer is says the overload, MaxVio: :math:`\max_e c_e / \bar{c} - 1`, 0 at best.
Padding counts nowhere.

Sources: Fedus et al., *Switch Transformers*, 2021, arXiv:2101.03961 (the loss); Wang et al.,
*Auxiliary-Loss-Free Load Balancing Strategy for Mixture-of-Experts*, 2024, arXiv:2408.15664.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from lm_from_scratch.layers.experts import Router, Routing


@contextmanager
def record_routing(model: nn.Module) -> Iterator[list[list[Routing]]]:
    """Record where the tokens of every forward pass of a built model go, with gradients.

    Yields one list for each layer of experts, in order; each forward appends its
    :class:`~lm_from_scratch.layers.experts.Routing`, whose N tokens are the rows of the batch one
    after another::

        with record_routing(model) as routings:
            loss = causal_lm_loss(model(idx), targets)
        loss = loss + 0.01 * balancing_loss([layer[-1] for layer in routings])

    Raises ``ValueError`` for a model without experts.
    """
    routers = [module for module in model.modules() if isinstance(module, Router)]
    if not routers:
        raise ValueError(f"{type(model).__name__} has no router: no layer of it has experts")
    routings: list[list[Routing]] = [[] for _ in routers]
    handles = [
        router.register_forward_hook(lambda module, args, out, routing=routing: routing.append(out))
        for router, routing in zip(routers, routings, strict=True)
    ]
    try:
        yield routings
    finally:
        for handle in handles:
            handle.remove()


def visits(routing: Routing, real: Tensor | None = None) -> Tensor:
    """How many of N tokens visit each expert: (E,) whole numbers in float32. ``real`` (N,), or of
    any shape with N elements, is false for padding."""
    E = routing.logits.shape[-1]
    experts = routing.experts if real is None else routing.experts[real.flatten().bool()]
    return torch.bincount(experts.flatten(), minlength=E).float()


def overload(counts: Tensor) -> float:
    """MaxVio of ``counts`` (E,): how much busier than the mean the busiest expert is. 0 if nobody
    is."""
    mean = float(counts.mean())
    return float(counts.max()) / mean - 1.0 if mean else 0.0


def balancing_loss(routings: Sequence[Routing], real: Tensor | None = None) -> Tensor:
    """The loss above, over all tokens of all ``routings``; a scalar with a gradient. ``real``
    (N,) is as in :func:`visits`, the same for each of them.

    Of several layers it pools visits and probabilities first, as ``transformers`` does: what one
    layer has too much of, another may lack. Called for each layer alone, it balances each. It is 0
    without any real token. Raises ``ValueError`` without a routing.
    """
    if not routings:
        raise ValueError("there is no routing to balance")
    mass = routings[0].logits.new_zeros(routings[0].logits.shape[-1], dtype=torch.float32)
    counts, tokens = mass.clone(), 0
    for routing in routings:
        work = torch.promote_types(routing.logits.dtype, torch.float32)
        probabilities = routing.logits.softmax(dim=-1, dtype=work)  # (N, E)
        if real is not None:
            probabilities = probabilities[real.flatten().bool()]
        mass = mass + probabilities.sum(dim=0)
        counts = counts + visits(routing, real)
        tokens += len(probabilities)
    return len(counts) * (counts * mass).sum() / max(tokens, 1) ** 2


def balanced_bias(bias: Tensor, counts: Tensor, rate: float = 0.001) -> Tensor:
    """The correction bias (E,) after a step in which the experts had ``counts`` (E,) visits: each
    entry moves by ``rate``, up if its expert was below the mean, down if above."""
    return bias + rate * (counts.mean() - counts).sign().to(bias.dtype)
