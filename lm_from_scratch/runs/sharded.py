"""Optimizers for parameters that are spread over several processes.

FSDP2 keeps its parameters, and the gradients and states that belong to them, as ``DTensor``: each
process holds some rows. Most of torch computes with them as with any tensor. What remains is to say
where a result belongs, and to gather what has to be known whole: ``item()`` of a sum, for one, is
the sum of the rows in this process. The functions here, for tensors of any shape, leave every other
tensor as it is.
"""

from typing import Any

import torch
from torch import Tensor

from lm_from_scratch.optim.adamw import AdamW, Number, tensors_of
from lm_from_scratch.optim.galore import GaLore, is_projected, move_
from lm_from_scratch.optim.galore_basis import Bases, project_back
from lm_from_scratch.optim.muon import Muon


class ShardedAdamW(AdamW):
    """AdamW whose parameters may be spread over the processes."""

    def check_group(self, group: dict[str, Any]) -> None:
        """Raises ``ValueError`` also for moments in 8 bits: a block of them would lie in several
        processes."""
        super().check_group(group)
        for p in tensors_of(group):
            refuse_codes(p, group)

    def shapes_in(self, group: dict[str, Any], p: Tensor) -> dict[str, torch.Size]:
        refuse_codes(p, group)  # those of a file, too
        return super().shapes_in(group, p)

    def gathered(self, x: Tensor) -> Tensor:
        """What was computed from gradients, ``x``, the same in every process."""
        return gathered(x)


class ShardedGaLore(ShardedAdamW, GaLore):
    """GaLore whose parameters may be spread over the processes by rows.

    A gradient is gathered when a basis is made, and at no other time. Every process holds the bases
    whole, and the moments of a matrix with a left basis: on many processes that can be more than
    AdamW's share.
    """

    def coordinates(self, grad: Tensor, state: dict[str, Tensor]) -> Tensor:
        """The ``grad`` (m, n) in the coordinates of the basis, where the moments are."""
        return placed(super().coordinates(grad, state), like=grad, rows="left" not in state)

    def move(
        self, p: Tensor, direction: Tensor, state: dict[str, Tensor], kept: Number, length: Number
    ) -> None:
        """Shrink ``p``, and move it against the ``direction`` (r or m, r or n)."""
        if not is_spread(p):
            return super().move(p, direction, state, kept, length)
        left, right = state.get("left"), state.get("right")
        change = project_back(direction, left, right, matmul=self.matmul).view(p.shape)
        move_(p, change.redistribute(placements=p.placements), kept, length)  # type: ignore[attr-defined]

    def make_basis(self, p: Tensor, grad: Tensor, group: dict[str, Any]) -> None:
        """A new basis for ``p`` from all rows of its ``grad`` (m, n)."""
        super().make_basis(p, gathered(grad), group)

    def find_basis(self, p: Tensor, grad: Tensor, start: Bases, group: dict[str, Any]) -> Bases:
        """The bases that the first process finds, in every process."""
        a, b = (None if basis is None else gathered(basis) for basis in start)
        left, right = super().find_basis(p, grad, (a, b), group)
        return replicated(left, like=p), replicated(right, like=p)

    def new_state(self, p: Tensor, group: dict[str, Any]) -> dict[str, Tensor]:
        """The state before the first step. Moments are spread as the rows of the parameter; but a
        left basis sums over the rows of p."""
        state = super().new_state(p, group)
        if not is_spread(p) or not is_projected(p, group):
            return state
        return {
            name: zeros(x, like=p, rows="left" not in state and name.startswith("exp_avg"))
            if x.dim() > 0
            else x
            for name, x in state.items()
        }


class ShardedMuon(ShardedAdamW, Muon):
    """Muon whose parameters may be spread over the processes by rows, as its momentum is.

    Every process gathers each matrix in every step, and orthogonalises all of it; torch computes
    with whole matrices, so nothing is shared out but the memory.
    """

    def orthogonal(self, mean: Tensor, group: dict[str, Any]) -> Tensor:
        """The rows of this process, of what the first process finds."""
        if not is_spread(mean):
            return super().orthogonal(mean, group)
        matrix = replicated(super().orthogonal(gathered(mean), group), like=mean)
        return matrix.redistribute(placements=mean.placements)  # type: ignore[union-attr, attr-defined]


def sharded(kind: type[AdamW]) -> type[AdamW]:
    """The optimizer that takes the steps of ``kind`` on parameters that are spread."""
    return {AdamW: ShardedAdamW, GaLore: ShardedGaLore, Muon: ShardedMuon}[kind]


def refuse_codes(p: Tensor, group: dict[str, Any]) -> None:
    """Raises ``ValueError`` for moments in 8 bits of a parameter that is spread."""
    if group["optim_bits"] == 8 and is_spread(p):
        raise ValueError("optim_bits=8 is for whole parameters, not for those of FSDP: use 32")


def is_spread(tensor: Tensor) -> bool:
    """Whether a tensor is one of several processes together."""
    return hasattr(tensor, "full_tensor")


def gathered(tensor: Tensor) -> Tensor:
    """A tensor that is spread over the processes, gathered; any other as it is."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def zeros(tensor: Tensor, like: Tensor, rows: bool) -> Tensor:
    """As many zeros as in ``tensor``, their rows spread as those of ``like``; or all of them in
    every process."""
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor import zeros as spread_zeros

    assert isinstance(like, DTensor)
    return spread_zeros(
        tensor.shape,
        dtype=tensor.dtype,
        device_mesh=like.device_mesh,
        placements=placements(like, rows),
    )


def replicated(basis: Tensor | None, like: Tensor) -> Tensor | None:
    """The basis that the first process made, on every process over which ``like`` is spread."""
    if basis is None or not is_spread(like):
        return basis
    from torch.distributed.tensor import DTensor, distribute_tensor

    assert isinstance(like, DTensor)
    return distribute_tensor(basis, like.device_mesh, placements(like, rows=False))


def placed(tensor: Tensor, like: Tensor, rows: bool) -> Tensor:
    """A result of products, moved to where :func:`zeros` of the same arguments would be."""
    if not is_spread(like):
        return tensor
    from torch.distributed.tensor import DTensor

    assert isinstance(tensor, DTensor) and isinstance(like, DTensor)
    return tensor.redistribute(placements=placements(like, rows))


def placements(like: Tensor, rows: bool) -> list[Any]:
    """Rows spread as those of ``like``, or everything on every process: also where there are fewer
    rows than processes, because torch computes nothing in place on those."""
    from torch.distributed.tensor import DTensor, Replicate

    assert isinstance(like, DTensor)
    mesh = like.device_mesh
    spread = rows and like.shape[0] >= mesh.size()
    return list(like.placements) if spread else [Replicate()] * mesh.ndim
