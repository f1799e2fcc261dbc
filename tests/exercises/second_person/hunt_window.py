"""Answers to hunt_window, written from its text by a second person."""

import torch


def counted(n_layers, sliding_window, max_window_layers, use_sliding_window, T, S):
    """Right: one layer, query and key at a time."""
    out = torch.zeros(n_layers, T, S, dtype=torch.bool)
    for layer in range(n_layers):
        width = S
        if use_sliding_window and not layer < max_window_layers:
            width = sliding_window
        for t in range(T):
            end = S - T + t + 1
            out[layer, t, max(0, end - width) : end] = True
    return out


def stacked(n_layers, T, S, width, slides):
    """Right if it is given what the text says: the width, and which layers slide."""
    age = torch.arange(S - T, S)[:, None] - torch.arange(S)
    full = age >= 0
    return torch.stack([full & (age < width) if slides(i) else full for i in range(n_layers)])


def only_the_layers_mended(n_layers, sliding_window, max_window_layers, use_sliding_window, T, S):
    return stacked(n_layers, T, S, (sliding_window or 0) + 1,
                   lambda i: use_sliding_window and i >= max_window_layers)  # fmt: skip


def only_the_width_mended(n_layers, sliding_window, max_window_layers, use_sliding_window, T, S):
    return stacked(n_layers, T, S, sliding_window,
                   lambda i: use_sliding_window and i < max_window_layers)  # fmt: skip


def first_layer_above(n_layers, sliding_window, max_window_layers, use_sliding_window, T, S):
    return stacked(n_layers, T, S, sliding_window,
                   lambda i: use_sliding_window and i > max_window_layers)  # fmt: skip


def last_so_many_layers(n_layers, sliding_window, max_window_layers, use_sliding_window, T, S):
    return stacked(n_layers, T, S, sliding_window,
                   lambda i: use_sliding_window and i >= n_layers - max_window_layers
                   )  # fmt: skip


def switch_not_read(n_layers, sliding_window, max_window_layers, use_sliding_window, T, S):
    return stacked(n_layers, T, S, sliding_window,
                   lambda i: sliding_window is not None and i >= max_window_layers)  # fmt: skip


def zero_means_no_layer(n_layers, sliding_window, max_window_layers, use_sliding_window, T, S):
    return stacked(
        n_layers, T, S, sliding_window,
        lambda i: bool(use_sliding_window and max_window_layers) and i >= max_window_layers,
    )  # fmt: skip


def one_more_instead_of_one_less(
    n_layers, sliding_window, max_window_layers, use_sliding_window, T, S
):
    return stacked(n_layers, T, S, (sliding_window or 0) + 2,
                   lambda i: use_sliding_window and i >= max_window_layers)  # fmt: skip


def two_less(n_layers, sliding_window, max_window_layers, use_sliding_window, T, S):
    return stacked(n_layers, T, S, (sliding_window or 0) - 1,
                   lambda i: use_sliding_window and i >= max_window_layers)  # fmt: skip


def window_of_one_taken_for_none(
    n_layers, sliding_window, max_window_layers, use_sliding_window, T, S
):
    left = sliding_window and sliding_window - 1
    return stacked(n_layers, T, S, left + 1 if left else S,
                   lambda i: use_sliding_window and i >= max_window_layers)  # fmt: skip


def compared_with_the_queries(
    n_layers, sliding_window, max_window_layers, use_sliding_window, T, S
):
    return stacked(
        n_layers, T, S, sliding_window,
        lambda i: use_sliding_window and sliding_window < T and i >= max_window_layers,
    )  # fmt: skip


def queries_are_the_first_tokens(
    n_layers, sliding_window, max_window_layers, use_sliding_window, T, S
):
    age = torch.arange(T).view(-1, 1) - torch.arange(S)
    width = torch.full((n_layers, 1, 1), S)
    if use_sliding_window:
        width[max_window_layers:] = sliding_window
    return (age >= 0) & (age < width)


def future_in_sliding_layers(n_layers, sliding_window, max_window_layers, use_sliding_window, T, S):
    age = torch.arange(S - T, S).view(-1, 1) - torch.arange(S)
    masks = [age >= 0] * n_layers
    if use_sliding_window:
        for i in range(max_window_layers, n_layers):
            masks[i] = age.abs() < sliding_window
    return torch.stack(masks)


def ones_and_zeros(n_layers, sliding_window, max_window_layers, use_sliding_window, T, S):
    return counted(
        n_layers, sliding_window, max_window_layers, use_sliding_window, T, S
    ).float()  # fmt: skip


def hidden_and_seen_swapped(n_layers, sliding_window, max_window_layers, use_sliding_window, T, S):
    return ~counted(n_layers, sliding_window, max_window_layers, use_sliding_window, T, S)


ANSWERS = {
    only_the_layers_mended: "the layers are repaired, but the window has a key too many",
    only_the_width_mended: "the window is repaired, but the lower layers slide",
    first_layer_above: "the layer max_window_layers itself does not slide",
    last_so_many_layers: "the last max_window_layers layers slide, not those from there on",
    switch_not_read: "the switch is forgotten",
    zero_means_no_layer: "max_window_layers = 0 is taken for none",
    one_more_instead_of_one_less: "one key more is added, where one must be taken away",
    two_less: "the window has a key too few",
    window_of_one_taken_for_none: "a window of one key is taken for none",
    compared_with_the_queries: "the window is left out when there are few queries",
    queries_are_the_first_tokens: "the queries are the first tokens, not the last",
    future_in_sliding_layers: "",
    ones_and_zeros: "",
    hidden_and_seen_swapped: "True where the key is hidden",
}
RIGHT = [counted]
