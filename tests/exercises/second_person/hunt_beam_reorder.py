"""Answers to hunt_beam_reorder that were written from its text alone."""

import torch


def rows_of(parents):
    P, n = parents.shape
    return (parents + n * torch.arange(P)[:, None]).flatten()


def right_by_rows(cache, parents):
    rows = rows_of(parents)
    for x in cache.keys + cache.values:
        x.copy_(x[rows])
    return cache


def right_by_gather(cache, parents):
    P, n = parents.shape
    L = cache.length
    for x in (*cache.keys, *cache.values):
        used = x[:, :, :L].unflatten(0, (P, n))
        x[:, :, :L] = torch.stack([one[p] for one, p in zip(used, parents, strict=True)]).flatten(
            0, 1
        )
    return cache


def row_by_row_in_place(cache, parents):
    for x in cache.keys + cache.values:
        for beam, row in enumerate(rows_of(parents).tolist()):
            x[beam] = x[row]
    return cache


def keys_only(cache, parents):
    rows = rows_of(parents)
    for x in cache.keys:
        x.copy_(x[rows])
    return cache


def first_prompt_for_all(cache, parents):
    rows = parents.flatten()
    for x in cache.keys + cache.values:
        x.copy_(x[rows])
    return cache


def first_layer_only(cache, parents):
    rows = rows_of(parents)
    for x in (cache.keys[0], cache.values[0]):
        x.copy_(x[rows])
    return cache


def new_tensors_in_the_lists(cache, parents):
    rows = rows_of(parents)
    cache.keys = [x[rows] for x in cache.keys]
    cache.values = [x[rows] for x in cache.values]
    return cache


def lists_kept_tensors_new(cache, parents):
    rows = rows_of(parents)
    for group in (cache.keys, cache.values):
        group[:] = [x.index_select(0, rows) for x in group]
    return cache


def data_swapped_under_the_object(cache, parents):
    rows = rows_of(parents)
    for x in cache.keys + cache.values:
        x.data = x.data[rows]
    return cache


def pairs_returned(cache, parents):
    right_by_rows(cache, parents)
    return tuple(zip(cache.keys, cache.values, strict=True))


def nothing_returned(cache, parents):
    right_by_rows(cache, parents)


def offset_by_the_prompts(cache, parents):
    P, _n = parents.shape
    rows = (parents + P * torch.arange(P)[:, None]).flatten()
    for x in cache.keys + cache.values:
        x.copy_(x[rows])
    return cache


def beams_interleaved(cache, parents):
    P, _n = parents.shape
    rows = (parents * P + torch.arange(P)[:, None]).T.flatten()
    for x in cache.keys + cache.values:
        x.copy_(x[rows])
    return cache


def offset_added_to_the_argument(cache, parents):
    P, n = parents.shape
    parents += n * torch.arange(P)[:, None]
    for x in cache.keys + cache.values:
        x.copy_(x[parents.flatten()])
    return cache


def inverse_direction(cache, parents):
    rows = rows_of(parents)
    for x in cache.keys + cache.values:
        old = x.clone()
        x[rows] = old
    return cache


def view_kept_as_old(cache, parents):
    for x in cache.keys + cache.values:
        old = x[:]
        for beam, row in enumerate(rows_of(parents).tolist()):
            x[beam] = old[row]
    return cache


def copied_list_of_the_same_tensors(cache, parents):
    old = list(cache.keys), list(cache.values)
    for layer in range(len(cache.keys)):
        for beam, row in enumerate(rows_of(parents).tolist()):
            cache.keys[layer][beam] = old[0][layer][row]
            cache.values[layer][beam] = old[1][layer][row]
    return cache


def last_token_left_out(cache, parents):
    rows, L = rows_of(parents), cache.length - 1
    for x in cache.keys + cache.values:
        x[:, :, :L] = x[rows, :, :L]
    return cache


def last_token_alone(cache, parents):
    rows, at = rows_of(parents), cache.length - 1
    for x in cache.keys + cache.values:
        x[:, :, at] = x[rows, :, at]
    return cache


def values_with_the_reordered_rows_twice(cache, parents):
    rows = rows_of(parents)
    for keys, values in zip(cache.keys, cache.values, strict=True):
        keys.copy_(keys[rows])
        values.copy_(values[rows][rows])
    return cache


def new_buffers_returned(cache, parents):
    rows = rows_of(parents)
    L, (B, H, room, D) = len(cache.keys), cache.keys[0].shape
    other = type(cache)(L, B, H, room, D)
    other.keys = [x[rows] for x in cache.keys]
    other.values = [x[rows] for x in cache.values]
    other.length = cache.length
    return other


def length_counted_on(cache, parents):
    right_by_rows(cache, parents)
    cache.length += 1
    return cache


ANSWERS = {
    row_by_row_in_place: "a parent is overwritten before it is read",
    keys_only: "values stay behind",
    first_prompt_for_all: "the second prompt follows the beams of the first",
    first_layer_only: "only the first layer follows",
    new_tensors_in_the_lists: "new tensors in the lists, instead of new numbers in the tensors",
    lists_kept_tensors_new: "new tensors in the lists, instead of new numbers in the tensors",
    data_swapped_under_the_object: "",
    pairs_returned: "the result is a tuple of tensors",
    nothing_returned: "nothing is returned",
    offset_by_the_prompts: "the rows of a prompt begin at its number times the number of prompts",
    beams_interleaved: "",
    offset_added_to_the_argument: "",
    inverse_direction: "parents are taken for children: beam i is written to row parents[i]",
    view_kept_as_old: "a parent is overwritten before it is read",
    copied_list_of_the_same_tensors: "a parent is overwritten before it is read",
    last_token_left_out: "the newest token stays behind",
    last_token_alone: "",
    values_with_the_reordered_rows_twice: "",
    new_buffers_returned: "",
    length_counted_on: "",
}
RIGHT = [right_by_rows, right_by_gather]
