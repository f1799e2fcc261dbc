r"""A lens: what would the model say if it stopped after this block?

A head and its norm turn the last state into logits. Nothing forbids giving them an earlier one,
because every block only *adds* to the stream. How to carry a state :math:`h_l` to the place where
they expect it makes the kinds of lens:

.. math::

   \text{logit lens:}\quad h_l \qquad
   \text{tuned lens:}\quad h_l A_l + b_l \qquad
   \text{Jacobian lens:}\quad h_l J_l, \qquad
   J_l = \mathrm{E}_t\Big[\sum_{s \ge t} \partial h_{L,s} / \partial h_{l,t}\Big]

The logit lens has no parameters. The tuned lens has an affine map for each place, fitted until its
words are those of the model's own end. The Jacobian lens is not fitted: it is the mean effect of a
small change here on the last states of this token and all later ones, over some texts. It has no
shift, so it is not the model to first order: it says what a direction pushes towards.

Sources: nostalgebraist, *interpreting GPT: the logit lens*, 2020; Belrose et al., *Eliciting Latent
Predictions from Transformers with the Tuned Lens*, 2023, arXiv:2303.08112. The mean Jacobian as a
map between layers: Hernandez et al., *Linearity of Relation Decoding in Transformer Language
Models*, 2023, arXiv:2308.09124 (with a shift, for one relation and one later token at a time).
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from lm_from_scratch.inside.sites import (
    Edit,
    activations,
    edited,
    one_stream,
    stream_sites,
)
from lm_from_scratch.limits import Count, Positive, require
from lm_from_scratch.models.blocks import final_norm
from lm_from_scratch.models.interface import CausalLM
from lm_from_scratch.models.modes import evaluating


@dataclass(frozen=True)
class Lens:
    """An affine map for each place of the stream, in front of the model's own norm and head. Place
    l is in front of block l; the last, L, is where the norm expects it."""

    model: CausalLM
    maps: Tensor  # (L + 1, C, C)
    shifts: Tensor  # (L + 1, C)

    def __call__(self, layer: int, state: Tensor) -> Tensor:
        """The logits (..., V) that the lens reads off the stream ``state`` (..., C) at a place."""
        carried = state.to(self.maps) @ self.maps[layer] + self.shifts[layer]
        return self.model.head(final_norm(self.model)(carried))


def logit_lens(model: CausalLM) -> Lens:
    """The lens without a map: the model's norm and head, at every place. Raises ``ValueError``, as
    all lenses do, for a model of several streams."""
    one_stream(model)
    places, C = len(stream_sites(model)), model.config.n_embd
    like = next(model.parameters())
    eye = torch.eye(C, dtype=like.dtype, device=like.device)
    return Lens(model, eye.expand(places, C, C), eye.new_zeros(places, C))


def tuned_lens(
    model: CausalLM, idx: Tensor, steps: int = 200, lr: float = 2e-3, rows: int = 8, seed: int = 0
) -> Lens:
    """The lens whose maps make the words of every place most like those of the model's end, in
    Kullback-Leibler divergence, on texts ``idx`` (B, T) without padding. It starts as the logit
    lens; every step of Adam sees ``rows`` of the texts."""
    require(Count, steps=steps, rows=rows)
    require(Positive, lr=lr)
    lens = logit_lens(model)
    logits, kept = activations(model, idx, stream_sites(model))
    states = torch.stack(list(kept.values()))  # (L + 1, B, T, C)
    words = logits.log_softmax(-1)
    maps = lens.maps.clone().requires_grad_(True)
    shifts = lens.shifts.clone().requires_grad_(True)
    optimizer = torch.optim.Adam([maps, shifts], lr=lr)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, steps)
    generator = torch.Generator().manual_seed(seed)
    norm = final_norm(model)
    for _ in range(steps):
        some = torch.randint(len(idx), (rows,), generator=generator)
        with torch.enable_grad():
            carried = torch.einsum("lbtc,lcd->lbtd", states[:-1, some], maps[:-1])
            said = model.head(norm(carried + shifts[:-1, None, None])).log_softmax(-1)
            target = words[some].expand(len(said), *words[some].shape)
            loss = F.kl_div(said, target, reduction="none", log_target=True).sum(-1)
            loss = loss.mean((1, 2)).sum()
        maps.grad, shifts.grad = torch.autograd.grad(loss, [maps, shifts])
        optimizer.step()
        schedule.step()
    return Lens(model, maps.detach(), shifts.detach())


def jacobian_lens(model: CausalLM, idx: Tensor) -> Lens:
    """The lens of the mean Jacobian: how a small change of a token's state at each place moves the
    last states of that token and all later ones, summed over these, on average over the tokens of
    ``idx`` (B, T), without padding. It takes one pass backward for each of the C features."""
    one_stream(model)
    sites = stream_sites(model)
    kept: dict[int, Tensor] = {}

    def keep(layer: int) -> Edit:
        def edit(x: Tensor) -> Tensor:
            kept[layer] = x if x.requires_grad else x.requires_grad_()
            return kept[layer]

        return edit

    edits = {site: keep(site.layer) for site in sites}
    with evaluating(model), edited(model, edits), torch.enable_grad():
        model(idx)
        states = [kept[site.layer] for site in sites]
        last = states[-1].sum((0, 1)).unbind()  # C sums
    rows = [torch.autograd.grad(one, states, retain_graph=True) for one in last]
    maps = torch.stack([torch.stack([g.mean((0, 1)) for g in row]) for row in rows], -1)
    return Lens(model, maps, maps.new_zeros(maps.shape[:2]))  # maps (L + 1, C, C): from, to
