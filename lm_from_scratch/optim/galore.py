r"""GaLore: Adam in a small space that follows the gradient.

Adam's two moments are each as large as the weight. The gradient of a weight matrix, though, points
mostly into a few directions. GaLore finds an orthonormal basis of them, keeps Adam's moments in its
coordinates, and turns Adam's direction back into a matrix:

.. math::

   R_t = P^\top G_t \, Q, \qquad
   d_t = \mathrm{Adam}(R_t), \qquad
   W_t = (1 - \eta \lambda) \, W_{t-1} - \eta \, \alpha \, P \, d_t \, Q^\top

with a gradient :math:`G_t` of shape (m, n), :math:`P` of shape (m, r) and :math:`Q` of shape
(n, r). The usual projection has only one of the two: a tall matrix gets :math:`Q`, a wide one gets
:math:`P`, so that the basis is the smaller one, and the moments have shape (m, r) or (r, n). The
basis is made from a gradient, and made anew every ``update_proj_gap`` steps. It is the weights that
are trained, all of them: what a low rank has is the step between two changes of the basis.

The paper keeps the moments as they are when the basis changes, although their numbers then mean
other directions. Robert et al. turn them into the new basis.

How a basis is made: :mod:`lm_from_scratch.optim.galore_basis`.

Sources: Zhao et al., *GaLore: Memory-Efficient LLM Training by Gradient Low-Rank Projection*, 2024,
arXiv:2403.03507; Robert et al., *LDAdam*, 2025, arXiv:2410.16103 (rotated moments).
"""

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from lm_from_scratch.optim.adamw import AdamW, Number, adam_direction, fused_step
from lm_from_scratch.optim.eight_bit import decoded, stored, stored_shapes
from lm_from_scratch.optim.galore_basis import (
    BASES,
    PROJECTION_TYPES,
    Bases,
    Matmul,
    captured_energy,
    project,
    project_back,
    random_basis,
    rotate_moments,
    sides,
    singular_basis,
    without_rounding,
)

MOMENTS = ("keep", "rotate", "reset")


def galore_step(
    param: Tensor,
    grad: Tensor,
    left: Tensor | None,
    right: Tensor | None,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    step: Number,
    lr: Number = 1e-3,
    betas: tuple[Number, Number] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 1e-2,
    scale: float = 0.25,
) -> tuple[Tensor, Tensor, Tensor]:
    """The new ``param`` (m, n), then the new moments ``exp_avg`` and ``exp_avg_sq``
    (r or m, r or n), from ``grad`` (m, n) and the bases ``left`` (m, r) and ``right`` (n, r), by
    the formulas above.

    A step of :class:`GaLore` between two changes of the basis. Computed in the dtype of the
    moments, which may be wider than that of the parameter and its gradient.
    """
    low = project(grad.to(exp_avg.dtype), left, right)
    direction, exp_avg, exp_avg_sq = adam_direction(low, exp_avg, exp_avg_sq, step, betas, eps)
    new = (1 - lr * weight_decay) * param.to(exp_avg.dtype)
    new = new - lr * scale * project_back(direction, left, right)
    return new.to(param.dtype), exp_avg, exp_avg_sq


def check_options(group: Mapping[str, Any]) -> None:
    """Raises ``ValueError`` for a number or a word that no projection can have."""
    for name in ("rank", "update_proj_gap"):
        value = group[name]
        if value is not None and (type(value) is not int or value < 1):
            raise ValueError(f"{name}={value!r} must be None or a whole number of at least 1")
    for name, known in (
        ("projection_type", PROJECTION_TYPES), ("basis", BASES), ("moments", MOMENTS)
    ):  # fmt: skip
        if group[name] not in known:
            raise ValueError(f"{name}={group[name]!r} must be one of {known}")
    if not 0.0 < group["scale"] < math.inf:
        raise ValueError(f"scale={group['scale']} must be above 0 and finite")


class GaLore(AdamW):
    """AdamW that keeps its moments in a low-rank space, for the groups that name a ``rank``.

    .. code-block:: python

       matrices = [p for p in model.blocks.parameters() if p.dim() == 2]
       others = [p for p in model.parameters() if all(p is not m for m in matrices)]
       optimizer = GaLore([{"params": matrices, "rank": 128}, {"params": others}], lr=1e-2)

    A group is an ordinary group of torch's optimizers, with these options:

    * ``rank``: of the projection; ``None`` is plain AdamW. Matrices are projected; a weight of
      more dimensions, like that of a convolution, as the matrix (out, everything else); one of
      fewer is left to AdamW. A rank above a matrix's smaller side is that side, and costs more
      memory than AdamW. A rank that is changed takes effect with the next basis; moments that no
      longer fit begin anew.
    * ``update_proj_gap``: steps for which a basis is used; ``None`` keeps the first for ever.
    * ``max_drift``: make a new basis earlier, as soon as the share of the gradient that the basis
      captures has fallen by this part of what it was when the basis was made.
    * ``scale``: α, which the projected direction is multiplied with. The decay is not.
    * ``projection_type``: ``std``, ``reverse_std``, ``left``, ``right``, ``full``, ``random``.
    * ``basis``: ``svd``, ``gram`` or ``subspace``, see
      :func:`~lm_from_scratch.optim.galore_basis.singular_basis`.
    * ``seed``: of the ``random`` directions, which differ per parameter and per basis.
    * ``moments``: at a new basis ``keep`` them as they are (the paper), ``rotate`` them into it,
      or ``reset`` them to zero, with their step count. With ``subspace`` the new basis continues
      the old one, so that kept moments nearly keep their meaning.

    The first step makes a basis, then every ``update_proj_gap``-th after it: 1, 201, 401, ... A
    gradient of zeros makes none that lasts: the next step makes another.

    The state of a projected parameter is ``left`` and ``right`` (as many as it has), the rank-sized
    ``exp_avg`` and ``exp_avg_sq``, ``step``, ``age`` (steps that the basis was used for), ``bases``
    (how many were made), and with ``max_drift`` the ``energy`` that the basis captured at first. It
    is kept in float32 for weights of lower precision: in bfloat16 the second moment would never
    decay, because 0.999 v rounds to v. (The state of the others has the dtype of the weight, as in
    torch.) With ``optim_bits=8`` the moments are kept in one byte a number, as in AdamW; the bases
    stay as they are. Every entry is a tensor, so that a checkpoint loads with
    ``weights_only=True``.

    For parameters that are spread over several processes there is
    :class:`~lm_from_scratch.runs.sharded.ShardedGaLore`.
    """

    #: Of the products with a gradient or a basis; :mod:`lm_from_scratch.instruments.onednn` has
    #: another.
    matmul: Matmul = staticmethod(torch.matmul)
    optional = frozenset({"energy"})  # ``max_drift`` may have been switched on or off since

    def __init__(
        self,
        params: Iterable[Any],
        lr: Number = 1e-3,
        betas: tuple[Number, Number] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        rank: int | None = None,
        update_proj_gap: int | None = 200,
        max_drift: float | None = None,
        scale: float = 0.25,
        projection_type: str = "std",
        basis: str = "gram",
        moments: str = "keep",
        seed: int = 0,
        fused: bool | None = None,
        optim_bits: int = 32,
    ) -> None:
        defaults = dict(
            lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, fused=fused, rank=rank,
            update_proj_gap=update_proj_gap, max_drift=max_drift, scale=scale,
            projection_type=projection_type, basis=basis, moments=moments, seed=seed,
            optim_bits=optim_bits,
        )  # fmt: skip
        torch.optim.Optimizer.__init__(self, params, defaults)

    def check_group(self, group: dict[str, Any]) -> None:
        """Raises ``ValueError`` for an option that is unknown or out of range."""
        super().check_group(group)
        check_options(group)
        if type(group["seed"]) is not int or not 0 <= group["seed"] < 2**63:
            raise ValueError(f"seed={group['seed']!r} must be a whole number in [0, 2**63)")
        if group["max_drift"] is not None and not 0.0 < group["max_drift"] < 1.0:
            raise ValueError(f"max_drift={group['max_drift']} must be None or between 0 and 1")

    # ------------------------------------------------------------------------------- the step

    def update(self, params: list[Tensor], group: dict[str, Any]) -> None:
        """One step for ``params``, parameters of ``group`` whose gradients were checked."""
        super().update([p for p in params if not is_projected(p, group)], group)
        for p in params:
            if is_projected(p, group):
                self.update_projected(p, self.low_gradient(p, group), group)

    @torch.no_grad()
    def low_gradient(self, p: Tensor, group: dict[str, Any], may_renew: bool = True) -> Tensor:
        """The gradient in the coordinates of the basis, which is made first if one is due."""
        state, grad = self.state[p], matrix(p.grad)
        gap = group["update_proj_gap"] or math.inf
        if "age" in state and not (may_renew and state["age"].item() >= gap):
            low = self.coordinates(grad, state)
            if not (may_renew and self.has_drifted(low, grad, state, group)):
                return low
        self.make_basis(p, grad, group)
        low = self.coordinates(grad, state)
        low = without_rounding(low, state.get("left"), state.get("right"))
        if group["max_drift"] is not None:
            state["energy"] = torch.tensor(self.gathered(captured_energy(low, grad)).item())
        return low

    @torch.no_grad()
    def update_projected(self, p: Tensor, low: Tensor, group: dict[str, Any]) -> None:
        """The step of one matrix from its projected gradient ``low`` (r or m, r or n)."""
        state = self.state[p]
        state["age"] += 1
        with decoded(state, group["optim_bits"], low.dtype):
            direction = self.direction(low, state, group)
        kept, length = 1 - group["lr"] * group["weight_decay"], group["lr"] * group["scale"]
        self.move(p, direction, state, kept, length)

    def direction(self, low: Tensor, state: dict[str, Tensor], group: dict[str, Any]) -> Tensor:
        """Adam's direction for the projected gradient ``low`` (r or m, r or n)."""
        if group["fused"]:  # it is what a weight of 0 becomes, at a learning rate of -1
            direction = torch.zeros_like(low)
            fused_step([direction], [low], [state], {**group, "lr": -1.0, "weight_decay": 0.0})
            return direction
        state["step"] += 1
        direction, state["exp_avg"], state["exp_avg_sq"] = adam_direction(
            low, state["exp_avg"], state["exp_avg_sq"], state["step"].item(), group["betas"],
            group["eps"],
        )  # fmt: skip
        return direction

    def coordinates(self, grad: Tensor, state: dict[str, Tensor]) -> Tensor:
        """The ``grad`` (m, n) in the coordinates of the basis."""
        wide = grad.to(torch.promote_types(grad.dtype, torch.float32))
        low = project(wide, state.get("left"), state.get("right"), matmul=self.matmul)
        # the gradient is finite: where the sum of its entries is not, the largest number stands
        return low.nan_to_num()

    def move(
        self, p: Tensor, direction: Tensor, state: dict[str, Tensor], kept: Number, length: Number
    ) -> None:
        """Shrink ``p`` to ``kept`` of it, and move it by ``length`` against the ``direction``
        (r or m, r or n), which the bases turn back into a matrix."""
        left, right = state.get("left"), state.get("right")
        if p.dim() == 2 and p.dtype == direction.dtype and self.matmul is torch.matmul:
            if left is None:
                assert right is not None
                a, b = direction, right.mT
            else:
                a, b = left, project_back(direction, None, right)
            p.addmm_(a, b, beta=float(kept), alpha=-float(length))  # in one pass over p
        else:
            change = project_back(direction, left, right, matmul=self.matmul)
            move_(p, change.view(p.shape), kept, length)

    # ------------------------------------------------------------------------------ the basis

    def has_drifted(
        self, low: Tensor, grad: Tensor, state: dict[str, Tensor], group: dict[str, Any]
    ) -> bool:
        """Whether ``low`` (r or m, r or n) keeps too little of the ``grad`` (m, n)."""
        if group["max_drift"] is None or "energy" not in state:
            return False
        drift = 1.0 - self.gathered(captured_energy(low, grad)) / state["energy"]
        return not drift.item() <= group["max_drift"]

    def make_basis(self, p: Tensor, grad: Tensor, group: dict[str, Any]) -> None:
        """A new basis for ``p`` from its ``grad`` (m, n), and what that means for the moments."""
        state = self.state[p]
        # no direction of a gradient of zeros is better than another
        has_direction = bool(grad.abs().amax())
        if "age" in state and not has_direction:
            return  # the basis stays, and is due in the next step too
        old = state.get("left"), state.get("right")
        count = int(state.get("bases", 0))
        new = self.find_basis(p, grad, old if count else (None, None), group)
        for name, basis in zip(("left", "right"), new, strict=True):
            state.pop(name, None)
            if basis is not None:
                state[name] = basis
        self.carry_moments(p, old, new, group)
        state["bases"] = torch.tensor(count + 1.0)
        state["age"] = torch.tensor(0.0 if has_direction else math.inf)

    def find_basis(self, p: Tensor, grad: Tensor, start: Bases, group: dict[str, Any]) -> Bases:
        """The bases that suit a ``grad`` (m, n) of ``p``; ``start`` are those that they replace."""
        left, right = sides((grad.shape[0], grad.shape[1]), group["projection_type"])
        if group["projection_type"] == "random":
            params = [other for every in self.param_groups for other in every["params"]]
            number = next(i for i, other in enumerate(params) if other is p)
            count = int(self.state[p].get("bases", 0))
            seed = ((group["seed"] * 1_000_003 + number) * 1_000_003 + count) % 2**63
            return random_basis(grad, group["rank"], left, right, seed)
        return singular_basis(grad, group["rank"], left, right, group["basis"], start, self.matmul)

    def carry_moments(self, p: Tensor, old: Bases, new: Bases, group: dict[str, Any]) -> None:
        """The moments in a new basis: kept, rotated, or begun anew where they do not fit it."""
        state, shape = self.state[p], self.shapes_in(group, p)["exp_avg"]
        # the group's options may have been changed since the last basis
        same_sides = [basis is None for basis in old] == [basis is None for basis in new]
        same_shape = "exp_avg" in state and state["exp_avg"].shape == shape
        usable = same_sides and (same_shape or group["moments"] == "rotate")
        anew = not state.get("step") or not usable or group["moments"] == "reset"
        if not anew and group["moments"] == "keep":
            return
        fresh = self.new_state(p, {**group, "optim_bits": 32})
        with decoded(state, group["optim_bits"], fresh["exp_avg"].dtype):
            if anew:
                state.update({name: fresh[name] for name in ("step", "exp_avg", "exp_avg_sq")})
                return
            t = state["step"].item()
            beta1, beta2 = group["betas"]
            state["exp_avg"], state["exp_avg_sq"] = rotate_moments(
                state["exp_avg"], state["exp_avg_sq"], old, new, (1 - beta1**t, 1 - beta2**t)
            )

    # ------------------------------------------------------------------------------ the state

    def reset(self) -> None:
        """Forget everything: moments, step counts, bases."""
        self.state.clear()

    def shapes_in(self, group: dict[str, Any], p: Tensor) -> dict[str, torch.Size]:
        if not is_projected(p, group):
            return super().shapes_in(group, p)
        m, n = p.shape[0], p.numel() // p.shape[0]
        rank = min(group["rank"], m, n)
        left, right = sides((m, n), group["projection_type"])
        low = torch.Size((rank if left else m, rank if right else n))
        shapes = {name: torch.Size() for name in ("step", "age", "bases")}
        shapes |= {"exp_avg": low, "exp_avg_sq": low}
        shapes |= {"left": torch.Size((m, rank))} if left else {}
        shapes |= {"right": torch.Size((n, rank))} if right else {}
        shapes |= {} if group["max_drift"] is None else {"energy": torch.Size()}
        return stored_shapes(shapes, group["optim_bits"])

    def new_state(self, p: Tensor, group: dict[str, Any]) -> dict[str, Tensor]:
        """The state before the first step: zeros, and a basis that is due."""
        if not is_projected(p, group):
            return super().new_state(p, group)
        wide = torch.promote_types(p.dtype, torch.float32)
        state = {
            name: torch.zeros(shape, dtype=wide, device=p.device) if shape else torch.zeros(())
            for name, shape in self.shapes_in({**group, "optim_bits": 32}, p).items()
        }
        step = torch.zeros((), device=p.device if group["fused"] else "cpu")
        state |= {"step": step, "age": torch.tensor(math.inf)}
        return stored(state, group["optim_bits"])

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "matmul": self.matmul}


def is_projected(p: Tensor, group: dict[str, Any]) -> bool:
    """Whether a parameter of this group is updated in a low-rank space."""
    return group["rank"] is not None and p.dim() >= 2 and p.numel() > 0


def matrix(grad: Tensor | None) -> Tensor:
    """A ``grad`` as a matrix (out, everything else)."""
    assert grad is not None
    return grad.flatten(1)


def move_(p: Tensor, change: Tensor, kept: Number, length: Number) -> None:
    """``p`` becomes ``kept`` of it, less ``length`` times the ``change`` of the same shape."""
    if p.dtype == change.dtype:
        p.mul_(kept).sub_(change.mul_(length))
    else:  # in bfloat16, 0.9999 p would be p
        p.copy_(kept * p.to(change.dtype) - length * change)
