"""Answers to hunt_window: other right ones, and wrong ones of a second person."""

import torch


def by_distance(n_layers, window, first, switch, T, S):
    """How far back a key is, compared with a number for each layer."""
    back = torch.arange(S - T, S)[:, None] - torch.arange(S)
    limits = [window if switch and window and i >= first else S for i in range(n_layers)]
    return (back >= 0) & (back < torch.tensor(limits)[:, None, None])


def by_triangles(n_layers, window, first, switch, T, S):
    """A triangle, less the triangle of what is too old."""
    whole = torch.ones(S, S).tril()
    masks = whole.repeat(n_layers, 1, 1)
    if switch and window is not None:
        masks[first:] -= whole.tril(-window)
    return masks[:, S - T :].bool()


def by_loop(n_layers, window, first, switch, T, S):
    """The keys of each query, written one after the other."""
    masks = torch.zeros(n_layers, T, S, dtype=torch.bool)
    for layer in range(n_layers):
        for t in range(T):
            stop = S - T + t + 1
            slides = switch and layer >= first
            start = max(0, stop - (window or 0)) if slides else 0
            masks[layer, t, start:stop] = True
    return masks


def by_two_masks(n_layers, window, first, switch, T, S):
    """One mask for each kind of layer, made once."""
    places = torch.arange(S)
    full = places <= places[S - T :, None]
    if not switch or window is None or window >= S:
        return full.expand(n_layers, T, S)
    sliding = full & (places + window > places[S - T :, None])
    first = min(first, n_layers)
    return torch.stack([full] * first + [sliding] * (n_layers - first))


RIGHT = [by_distance, by_triangles, by_loop, by_two_masks]

WRONG = [
    ("the future is visible in layers that slide",
     {"masks.append(flash_rule(T, S, left))":
      "age = torch.arange(S - T, S)[:, None] - torch.arange(S)\n"
      "        masks.append(age.abs() <= left if slides else age >= 0)"}),
    ("ones and zeros", {"torch.stack(masks)": "torch.stack(masks).float()"}),
]  # fmt: skip
