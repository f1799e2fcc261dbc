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

Sources: Zhao et al., *GaLore: Memory-Efficient LLM Training by Gradient Low-Rank Projection*, 2024,
arXiv:2403.03507; Robert et al., *LDAdam*, 2025, arXiv:2410.16103 (rotated moments); Halko,
Martinsson, Tropp, *Finding Structure with Randomness*, 2011, arXiv:0909.4061 (subspace iteration).
"""

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from lm_from_scratch.optim.adamw import (
    AdamW,
    Number,
    adam_direction,
    moment_names,
    tensors_of,
    torch_step,
)
from lm_from_scratch.optim.sharded import computed_alike, placed, replicated, whole, zeros

PROJECTION_TYPES = ("std", "reverse_std", "left", "right", "full", "random")
BASES = ("svd", "gram", "subspace")
MOMENTS = ("keep", "rotate", "reset")
Matmul = Callable[[Tensor, Tensor], Tensor]

# ------------------------------------------------------------------------------ the projection


def sides(shape: tuple[int, int], projection_type: str) -> tuple[bool, bool]:
    """Whether a matrix of this shape has a left basis, and whether it has a right one.

    ``std`` (and ``random``) takes the shorter side, ``reverse_std`` the longer one; a square matrix
    counts as tall.
    """
    tall = shape[0] >= shape[1]
    return {
        "left": (True, False),
        "right": (False, True),
        "full": (True, True),
        "std": (not tall, tall),
        "random": (not tall, tall),
        "reverse_std": (tall, not tall),
    }[projection_type]


def project(
    grad: Tensor, left: Tensor | None, right: Tensor | None, *, matmul: Matmul = torch.matmul
) -> Tensor:
    r"""Coordinates :math:`P^\top G Q` of a ``grad`` (m, n) in the bases ``left`` (m, r) and
    ``right`` (n, r); one that is ``None`` is absent."""
    if left is not None:
        grad = matmul(left.mT, grad)  # (r, n)
    if right is not None:
        grad = matmul(grad, right)  # (m, r) or (r, r)
    return grad


def project_back(
    low: Tensor, left: Tensor | None, right: Tensor | None, *, matmul: Matmul = torch.matmul
) -> Tensor:
    r"""The matrix :math:`P R Q^\top`, of shape (m, n), that has the coordinates ``low``
    (r or m, r or n) in the bases ``left`` (m, r) and ``right`` (n, r)."""
    if left is not None:
        low = matmul(left, low)
    if right is not None:
        low = matmul(low, right.mT)
    return low


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


# ----------------------------------------------------------------------------------- the basis


def singular_basis(
    grad: Tensor,
    rank: int,
    left: bool,
    right: bool,
    method: str = "svd",
    start: tuple[Tensor | None, Tensor | None] = (None, None),
    matmul: Matmul = torch.matmul,
) -> tuple[Tensor | None, Tensor | None]:
    """Orthonormal bases (m, r) and (n, r) of the directions in which ``grad`` (m, n) is largest.

    r is ``rank``, or the smaller side of the matrix if that is less. Three methods:

    * ``svd``: the leading singular vectors, from the full decomposition. Exact, and the slowest.
    * ``gram``: the leading eigenvectors of the smaller one of G G^T and G^T G. The same space, in
      exact arithmetic. Squaring loses directions that are 3000 times weaker than the strongest
      (in float32), which hold no more than 1e-7 of the gradient's energy each.
    * ``subspace``: two rounds of subspace iteration on the same small matrix, from the basis
      ``start``, the one that is being replaced. Nearly the same space. Without ``start``, ``gram``.

    The sign of a singular vector is arbitrary. It is fixed here, so that rounding flips it only
    where two entries tie: the largest entry is positive, or, after subspace iteration, the vector
    continues the one that it came from. Computed in float32 or the dtype of the gradient, whichever
    is wider.
    """
    grad = grad.to(torch.promote_types(grad.dtype, torch.float32))
    rank = min(rank, *grad.shape)
    if method == "svd":
        u, _, vh = torch.linalg.svd(grad, full_matrices=False)
        return signed(u[:, :rank]) if left else None, signed(vh[:rank].mT) if right else None
    grad = grad / mean_size(grad)
    return (
        leading_left(grad, rank, method, start[0], matmul) if left else None,
        leading_left(grad.mT, rank, method, start[1], matmul) if right else None,
    )


def leading_left(
    grad: Tensor, rank: int, method: str, start: Tensor | None, matmul: Matmul = torch.matmul
) -> Tensor:
    """An orthonormal basis (m, r) of the leading left singular vectors of ``grad`` (m, n), from the
    basis ``start`` (m, r)."""
    m, n = grad.shape
    gram = matmul(grad, grad.mT) if m <= n else matmul(grad.mT, grad)  # (s, s), s the smaller side
    if method == "subspace" and start is not None:
        basis = start.to(grad.dtype) if m <= n else matmul(grad.mT, start.to(grad.dtype))  # (s, r)
        # a little of every direction: iteration alone cannot leave a space for a better one
        generator = torch.Generator().manual_seed(0)
        basis = basis + 1e-3 * torch.randn(basis.shape, generator=generator).to(basis)
        for _ in range(2):
            basis = orthonormal(matmul(gram, basis))
        return orthonormal(matmul(grad, basis)) if m > n else basis  # (m, r)
    basis = torch.linalg.eigh(gram).eigenvectors[:, -rank:].flip(1)  # (s, r), largest first
    return signed(orthonormal(matmul(grad, basis)) if m > n else basis)  # (m, r)


def orthonormal(columns: Tensor) -> Tensor:
    """The orthonormal basis that Gram and Schmidt would make of the ``columns`` (m, r), in their
    order."""
    q, r = torch.linalg.qr(columns)
    return (q * torch.where(r.diagonal() < 0, -1.0, 1.0)).contiguous()


def signed(columns: Tensor) -> Tensor:
    """The ``columns`` (m, r), those turned round whose largest entry is negative; never a view."""
    entry = columns.gather(0, columns.abs().argmax(0, keepdim=True))  # (1, r)
    return (columns * torch.where(entry < 0, -1.0, 1.0)).contiguous()


def random_basis(grad: Tensor, rank: int, left: bool, right: bool, seed: int) -> tuple[Any, Any]:
    """Orthonormal bases of random directions for a ``grad`` (m, n), which depend on ``seed``
    alone."""
    generator = torch.Generator().manual_seed(seed)
    dtype = torch.promote_types(grad.dtype, torch.float32)
    rank = min(rank, *grad.shape)

    def random(size: int) -> Tensor:
        gaussian = torch.randn(size, rank, generator=generator, dtype=torch.float64)
        return torch.linalg.qr(gaussian).Q.to(grad.device, dtype).contiguous()

    return random(grad.shape[0]) if left else None, random(grad.shape[1]) if right else None


def rotate_moments(
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    old: tuple[Tensor | None, Tensor | None],
    new: tuple[Tensor | None, Tensor | None],
    corrections: tuple[float, float] = (1.0, 1.0),
) -> tuple[Tensor, Tensor]:
    r"""The moments ``exp_avg`` and ``exp_avg_sq`` (r or m, r or n) of the same gradients in the
    coordinates of another basis.

    The first moment is linear, so it is turned exactly, as far as the new basis can express it:
    :math:`m' = C m` with :math:`C = P_{new}^\top P_{old}`. The second moment is not: the mean of
    squares says nothing about how two coordinates vary together. Taken as uncorrelated (LDAdam),
    their variances add up with the squares of C:

    .. math:: v' = (C \circ C)(v - m \circ m) + (C m) \circ (C m)

    ``corrections`` are :math:`1 - \beta_1^t` and :math:`1 - \beta_2^t`: the formula is for the
    corrected moments.
    """
    turn = [None if a is None or b is None else a.mT @ b for a, b in zip(old, new, strict=True)]
    squares = [None if c is None else c.square() for c in turn]
    mean, mean_square = exp_avg / corrections[0], exp_avg_sq / corrections[1]
    variance = (mean_square - mean.square()).clamp(min=0.0)
    mean = project(mean, *turn)
    mean_square = project(variance, *squares) + mean.square()
    return mean * corrections[0], mean_square * corrections[1]


def without_rounding(low: Tensor, left: Tensor | None, right: Tensor | None) -> Tensor:
    """Coordinates ``low`` (r or m, r or n) in new bases ``left`` (m, r) and ``right`` (n, r), of
    which those that are only rounding are set to zero.

    A gradient of few tokens has fewer directions than the basis; the coordinates along the others
    should be 0. With two bases, everything beside the diagonal should be. What stands there instead
    is rounding, and Adam, where it divides a number by itself, would turn it into steps of full
    size. What goes is below 100 roundings of the largest.
    """
    scaled = low / mean_size(low)
    if left is not None and right is not None:
        size = whole(scaled.abs())
    else:  # of whole columns or rows: (1, r) or (r, 1)
        dim = 0 if left is None else 1
        size = whole(scaled.square().sum(dim, keepdim=True)).sqrt()
    kept = size >= 100 * torch.finfo(low.dtype).eps * size.amax()
    return low * computed_alike(kept.to(low.dtype), low)


def captured_energy(low: Tensor, grad: Tensor) -> Tensor:
    r"""The share :math:`\lVert R \rVert^2 / \lVert G \rVert^2` of a ``grad`` (m, n) that its
    projection ``low`` (r or m, r or n) keeps; 1 for a gradient of zeros."""
    grad = grad.to(low.dtype)
    scale = mean_size(grad)
    total, kept = (whole((x / scale).square().sum()) for x in (grad, low))
    return torch.where(total > 0, kept / total, 1.0).to(torch.float32)


def mean_size(x: Tensor) -> Tensor:
    """The mean size of the entries of ``x`` (any shape), or 1 if all are 0. Divided by it, no
    square is too small or too large for its dtype. (A largest entry would be one of no rows, on a
    process that has none.)"""
    size = whole((x.abs() / x.numel()).sum())
    return torch.where(size > 0, size, 1.0)


# ------------------------------------------------------------------------------- the optimizer


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
    * ``basis``: ``svd``, ``gram`` or ``subspace``, see :func:`singular_basis`.
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
    torch.) Every entry is a tensor, so that a checkpoint loads with
    ``weights_only=True``.

    With FSDP2's sharded parameters, the gradient is gathered when a basis is made, and at no other
    time. Every process holds the bases whole, and the moments of a matrix with a left basis: on
    many processes that can be more than AdamW's share.
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
        maximize: bool = False,
        fused: bool | None = None,
    ) -> None:
        torch.optim.Optimizer.__init__(
            self,
            params,
            dict(
                lr=lr,
                betas=betas,
                eps=eps,
                weight_decay=weight_decay,
                rank=rank,
                update_proj_gap=update_proj_gap,
                max_drift=max_drift,
                scale=scale,
                projection_type=projection_type,
                basis=basis,
                moments=moments,
                seed=seed,
                maximize=maximize,
                amsgrad=False,
                foreach=None,
                capturable=False,
                differentiable=False,
                fused=fused,
            ),
        )

    def check_group(self, group: dict[str, Any]) -> None:
        """Raises ``ValueError`` for an option that is unknown, out of range, or not of GaLore."""
        super().check_group(group)
        for name in ("amsgrad", "foreach", "capturable", "differentiable"):
            if group[name]:
                raise ValueError(f"{name}={group[name]} is for AdamW; GaLore does not offer it")
        for name in ("rank", "update_proj_gap"):
            value = group[name]
            if value is not None and (type(value) is not int or value < 1):
                raise ValueError(f"{name}={value!r} must be None or a whole number of at least 1")
        for name, known in (
            ("projection_type", PROJECTION_TYPES), ("basis", BASES), ("moments", MOMENTS)
        ):  # fmt: skip
            if group[name] not in known:
                raise ValueError(f"{name}={group[name]!r} must be one of {known}")
        if type(group["seed"]) is not int or not 0 <= group["seed"] < 2**63:
            raise ValueError(f"seed={group['seed']!r} must be a whole number in [0, 2**63)")
        if not 0.0 < group["scale"] < math.inf:
            raise ValueError(f"scale={group['scale']} must be above 0 and finite")
        if group["max_drift"] is not None and not 0.0 < group["max_drift"] < 1.0:
            raise ValueError(f"max_drift={group['max_drift']} must be None or between 0 and 1")
        for p in tensors_of(group):
            if group["rank"] is not None and p.is_complex():
                raise ValueError(f"a {p.dtype} parameter cannot be projected: rank must be None")

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
        grad = -grad if group["maximize"] else grad
        due = "age" not in state or state["age"].item() >= (group["update_proj_gap"] or math.inf)
        if "age" in state and (not due or not may_renew):
            low = self.coordinates(grad, state)
            if "energy" not in state or not may_renew:
                return low
            drift = 1.0 - captured_energy(low, grad) / state["energy"]
            if drift.item() <= group["max_drift"]:
                return low
        self.make_basis(p, grad, group)
        low = self.coordinates(grad, state)
        low = without_rounding(low, state.get("left"), state.get("right"))
        if group["max_drift"] is not None:
            state["energy"] = captured_energy(low, grad)
        return low

    def coordinates(self, grad: Tensor, state: dict[str, Tensor]) -> Tensor:
        """The ``grad`` (m, n) in the coordinates of the basis."""
        wide = grad.to(torch.promote_types(grad.dtype, torch.float32))
        low = project(wide, state.get("left"), state.get("right"), matmul=self.matmul)
        # the gradient is finite: where the sum of its entries is not, the largest number stands
        return placed(low, like=grad, rows="left" not in state).nan_to_num()

    def make_basis(self, p: Tensor, grad: Tensor, group: dict[str, Any]) -> None:
        """A new basis for ``p`` from its ``grad`` (m, n), and what that means for the moments."""
        state, gathered = self.state[p], whole(grad)
        found = bool(gathered.any())  # no direction of a gradient of zeros is better than another
        if "age" in state and not found:
            return  # the basis stays, and is due in the next step too
        left, right = sides((grad.shape[0], grad.shape[1]), group["projection_type"])
        old = state.get("left"), state.get("right")
        made = int(state.get("bases", 0))
        if group["projection_type"] == "random":
            params = [other for every in self.param_groups for other in every["params"]]
            number = next(i for i, other in enumerate(params) if other is p)
            seed = ((group["seed"] * 1_000_003 + number) * 1_000_003 + made) % 2**63
            new = random_basis(gathered, group["rank"], left, right, seed)
        else:
            a, b = (None if b is None or not made else whole(b) for b in old)
            new = singular_basis(
                gathered, group["rank"], left, right, group["basis"], (a, b), self.matmul
            )
        new = replicated(new[0], like=grad), replicated(new[1], like=grad)
        for name, basis in zip(("left", "right"), new, strict=True):
            state.pop(name, None)
            if basis is not None:
                state[name] = basis
        fresh = self.new_moments(p, group)
        # the group's options may have been changed since the last basis
        same_sides = [basis is None for basis in old] == [basis is None for basis in new]
        same_shape = "exp_avg" in state and state["exp_avg"].shape == fresh["exp_avg"].shape
        usable = same_sides and (same_shape or group["moments"] == "rotate")
        if not state.get("step") or not usable or group["moments"] == "reset":
            state.update(fresh)
        elif group["moments"] == "rotate":
            t = state["step"].item()
            corrections = tuple(1 - beta**t for beta in group["betas"])
            state["exp_avg"], state["exp_avg_sq"] = rotate_moments(
                state["exp_avg"], state["exp_avg_sq"], old, new, corrections
            )
        state["bases"] = torch.tensor(made + 1.0)
        state["age"] = torch.tensor(0.0 if found else math.inf)

    @torch.no_grad()
    def update_projected(self, p: Tensor, low: Tensor, group: dict[str, Any]) -> None:
        """The step of one matrix from its projected gradient ``low`` (r or m, r or n)."""
        state, lr = self.state[p], group["lr"]
        state["age"] += 1
        if group["fused"]:  # the direction is what a weight of 0 becomes, at a learning rate of -1
            direction = torch.zeros_like(low)
            alone = {**group, "lr": -1.0, "weight_decay": 0.0, "maximize": False}
            torch_step([direction], [low], [state], alone)
        else:
            state["step"] += 1
            direction, state["exp_avg"], state["exp_avg_sq"] = adam_direction(
                low, state["exp_avg"], state["exp_avg_sq"], state["step"].item(), group["betas"],
                group["eps"],
            )  # fmt: skip
        left, right, kept = state.get("left"), state.get("right"), 1 - lr * group["weight_decay"]
        plain = p.dim() == 2 and p.dtype == low.dtype and not hasattr(p, "full_tensor")
        if plain and self.matmul is torch.matmul:  # decay, product and sum in one pass over p
            if left is None:
                a, b = direction, right.mT
            else:
                a, b = left, project_back(direction, None, right)
            p.addmm_(a, b, beta=float(kept), alpha=-float(lr * group["scale"]))
            return
        step = project_back(direction, left, right, matmul=self.matmul).view(p.shape)
        if hasattr(p, "full_tensor"):
            step = step.redistribute(placements=p.placements)  # type: ignore[attr-defined]
        if p.dtype == step.dtype:
            p.mul_(kept).sub_(step.mul_(lr * group["scale"]))
        else:  # in bfloat16, 0.9999 p would be p
            p.copy_(kept * p.to(step.dtype) - lr * group["scale"] * step)

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
        return shapes | ({} if group["max_drift"] is None else {"energy": torch.Size()})

    def new_state(self, p: Tensor, group: dict[str, Any]) -> dict[str, Tensor]:
        """The state before the first step: zeros, and a basis that is due."""
        if not is_projected(p, group):
            return super().new_state(p, group)
        shapes = self.shapes_in(group, p)
        dtype = torch.promote_types(p.dtype, torch.float32)
        state = {
            name: zeros(shape, p, dtype, rows=False) if shape else torch.zeros(())
            for name, shape in shapes.items()
            if name not in moment_names(group)
        }
        due = torch.tensor(math.inf)  # the first gradient makes the basis
        return {**state, **self.new_moments(p, group), "age": due}

    def new_moments(self, p: Tensor, group: dict[str, Any]) -> dict[str, Tensor]:
        """The moments of a projected parameter and their step count, before the first step."""
        shapes = self.shapes_in(group, p)
        dtype = torch.promote_types(p.dtype, torch.float32)
        rows = "left" not in shapes  # a left basis sums over the rows of p
        moments = {name: zeros(shapes[name], p, dtype, rows) for name in moment_names(group)}
        return {"step": torch.zeros((), device=p.device if group["fused"] else "cpu"), **moments}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        # torch casts all state to the dtype of the parameter, which is wrong for bfloat16
        for p, group, state in self.pairs(state_dict):
            if state and is_projected(p, group):
                wide = torch.promote_types(p.dtype, torch.float32)
                for name, value in state.items():
                    with_p = value.dim() > 0 or (name == "step" and group["fused"])
                    device = p.device if with_p else torch.device("cpu")
                    dtype = wide if value.dim() > 0 else value.dtype
                    self.state[p][name] = value.detach().to(device, dtype, copy=True)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "matmul": self.matmul}


def is_projected(p: Tensor, group: dict[str, Any]) -> bool:
    """Whether a parameter of this group is updated in a low-rank space."""
    return group["rank"] is not None and p.dim() >= 2 and p.numel() > 0


def matrix(grad: Tensor | None) -> Tensor:
    """A ``grad`` as a matrix (out, everything else)."""
    assert grad is not None
    return grad.flatten(1)
