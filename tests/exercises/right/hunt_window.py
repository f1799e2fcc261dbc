"""Other right answers to hunt_window."""

import torch
from torch import Tensor


def by_distance(
    n_layers: int, window: int | None, first: int, switch: bool, T: int, S: int
) -> Tensor:
    """How far back a key is, compared with a number for each layer."""
    back = torch.arange(S - T, S)[:, None] - torch.arange(S)
    limits = [window if switch and window and i >= first else S for i in range(n_layers)]
    return (back >= 0) & (back < torch.tensor(limits)[:, None, None])


def by_triangles(
    n_layers: int, window: int | None, first: int, switch: bool, T: int, S: int
) -> Tensor:
    """A triangle, less the triangle of what is too old."""
    whole = torch.ones(S, S).tril()
    masks = whole.repeat(n_layers, 1, 1)
    if switch and window is not None:
        masks[first:] -= whole.tril(-window)
    return masks[:, S - T :].bool()


def by_loop(n_layers: int, window: int | None, first: int, switch: bool, T: int, S: int) -> Tensor:
    """The keys of each query, written one after the other."""
    masks = torch.zeros(n_layers, T, S, dtype=torch.bool)
    for layer in range(n_layers):
        for t in range(T):
            stop = S - T + t + 1
            slides = switch and layer >= first
            start = max(0, stop - (window or 0)) if slides else 0
            masks[layer, t, start:stop] = True
    return masks


def by_two_masks(
    n_layers: int, window: int | None, first: int, switch: bool, T: int, S: int
) -> Tensor:
    """One mask for each kind of layer, made once."""
    places = torch.arange(S)
    full = places <= places[S - T :, None]
    if not switch or window is None or window >= S:
        return full.expand(n_layers, T, S)
    sliding = full & (places + window > places[S - T :, None])
    first = min(first, n_layers)
    return torch.stack([full] * first + [sliding] * (n_layers - first))


RIGHT = {
    "how far back a key is": by_distance,
    "a triangle less a triangle": by_triangles,
    "one query at a time": by_loop,
    "one mask for each kind of layer": by_two_masks,
}
