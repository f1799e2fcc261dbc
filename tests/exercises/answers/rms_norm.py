"""Other right answers to rms_norm."""

import torch
import torch.nn.functional as F


def by_torch(x, weight, eps=1e-6):
    """The library's own norm, with the rounding before the weight."""
    precise = x if x.dtype == torch.float64 else x.float()
    return F.rms_norm(precise, weight.shape, None, eps).to(x.dtype) * weight


def by_vector_norm(x, weight, eps=1e-6):
    """The length of the vector over the root of its size."""
    wide = x.double()
    length = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
    mean_square = length**2 / x.shape[-1]
    return (wide / (mean_square + eps) ** 0.5).to(x.dtype) * weight


def by_einsum(x, weight, eps=1e-6):
    """A product of each vector with itself."""
    wide = x if x.dtype == torch.float64 else x.to(torch.float32)
    square = torch.einsum("...d,...d->...", wide, wide) / wide.shape[-1]
    return weight * torch.div(wide, torch.sqrt(square + eps).unsqueeze(-1)).type_as(x)


def by_loop(x, weight, eps=1e-6):
    """Row by row."""
    wide = x if x.dtype == torch.float64 else x.float()
    rows = [row / (row.dot(row) / len(row) + eps).sqrt() for row in wide.reshape(-1, x.shape[-1])]
    return torch.stack(rows).reshape(x.shape).to(x.dtype) * weight


RIGHT = [by_torch, by_vector_norm, by_einsum, by_loop]
