"""Other right answers to rms_norm."""

import torch
import torch.nn.functional as F
from torch import Tensor


def by_torch(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    """The library's own norm, with the rounding before the weight."""
    precise = x if x.dtype == torch.float64 else x.float()
    return F.rms_norm(precise, weight.shape, None, eps).to(x.dtype) * weight


def by_vector_norm(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    """The length of the vector over the root of its size."""
    wide = x.double()
    length = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
    mean_square = length**2 / x.shape[-1]
    return (wide / (mean_square + eps) ** 0.5).to(x.dtype) * weight


def by_einsum(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    """A product of each vector with itself."""
    wide = x if x.dtype == torch.float64 else x.to(torch.float32)
    square = torch.einsum("...d,...d->...", wide, wide) / wide.shape[-1]
    return weight * torch.div(wide, torch.sqrt(square + eps).unsqueeze(-1)).type_as(x)


def by_loop(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    """Row by row."""
    wide = x if x.dtype == torch.float64 else x.float()
    rows = [row / (row.dot(row) / len(row) + eps).sqrt() for row in wide.reshape(-1, x.shape[-1])]
    return torch.stack(rows).reshape(x.shape).to(x.dtype) * weight


RIGHT = {
    "the norm of torch": by_torch,
    "the length of the vector, in float64": by_vector_norm,
    "a product of each vector with itself": by_einsum,
    "row by row": by_loop,
}
