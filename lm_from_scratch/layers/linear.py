"""A linear map as the matrix that it multiplies by."""

from torch import Tensor, nn


def plain_matrix(linear: nn.Linear) -> Tensor | None:
    """The weight (out, in) of a linear map that is nothing but ``x @ weight.T + bias``, so that
    products may be taken in another order. ``None`` for one that surgery has made more of it, or
    whose weight is no plain tensor: it has to be applied."""
    weight = linear.weight
    is_plain = type(linear) is nn.Linear and type(weight) in (Tensor, nn.Parameter)
    return weight if is_plain else None
