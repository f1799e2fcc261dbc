"""Tensors that are spread over several processes, and the same functions for those that are not.

FSDP2 keeps its parameters, and the gradients and states that belong to them, as ``DTensor``: each
process holds some rows. The functions here, for tensors of any shape, leave every other tensor as
it is.
"""

from typing import Any

import torch
from torch import Tensor


def whole(tensor: Tensor) -> Tensor:
    """A tensor that is spread over the processes, gathered; any other as it is."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def zeros(shape: tuple[int, ...], like: Tensor, dtype: torch.dtype, rows: bool) -> Tensor:
    """Zeros on the device of ``like``, their rows spread as its rows are; or all of them on every
    process."""
    if not hasattr(like, "full_tensor"):
        return torch.zeros(shape, dtype=dtype, device=like.device)
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor import zeros as spread_zeros

    assert isinstance(like, DTensor)
    return spread_zeros(
        shape, dtype=dtype, device_mesh=like.device_mesh, placements=placements(like, rows)
    )


def computed_alike(tensor: Tensor, like: Tensor) -> Tensor:
    """A tensor that every process has computed from the same numbers: nothing need be sent."""
    if not hasattr(like, "full_tensor"):
        return tensor
    from torch.distributed.tensor import DTensor

    assert isinstance(like, DTensor)
    return DTensor.from_local(tensor, like.device_mesh, placements(like, rows=False))


def replicated(basis: Tensor | None, like: Tensor) -> Tensor | None:
    """The basis that the first process made, on every process over which ``like`` is spread."""
    if basis is None or not hasattr(like, "full_tensor"):
        return basis
    from torch.distributed.tensor import DTensor, distribute_tensor

    assert isinstance(like, DTensor)
    return distribute_tensor(basis, like.device_mesh, placements(like, rows=False))


def placed(tensor: Tensor, like: Tensor, rows: bool) -> Tensor:
    """A result of products, moved to where :func:`zeros` of the same arguments would be."""
    if not hasattr(like, "full_tensor"):
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
