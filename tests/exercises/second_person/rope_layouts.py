"""Answers to the exercise rope_layouts, written from its text alone."""

import torch


def places(rows, n_head):
    """For each new row, the old row that goes there."""
    d = rows // n_head
    order = []
    for head in range(n_head):
        for i in range(d // 2):
            order += [head * d + i, head * d + d // 2 + i]
    return order


def fits(rows, n_head):
    if n_head < 1 or rows % n_head or (rows // n_head) % 2:
        raise ValueError("no whole pairs")


def right_index(weight, n_head):
    fits(len(weight), n_head)
    return weight[places(len(weight), n_head)]


def right_stack_of_halves(weight, n_head):
    fits(len(weight), n_head)
    new = []
    for head in weight.chunk(n_head):
        a, b = head.chunk(2)
        new.append(torch.stack((a, b), 1).reshape(head.shape))
    return torch.cat(new)


def back_to_halves(weight, n_head):
    fits(len(weight), n_head)
    return weight[torch.tensor(places(len(weight), n_head)).argsort()]


def heads_forgotten(weight, n_head):
    fits(len(weight), n_head)
    return weight[places(len(weight), 1)]


def only_first_head(weight, n_head):
    fits(len(weight), n_head)
    d = len(weight) // n_head
    return torch.cat((weight[places(d, 1)], weight[d:]))


def columns_moved(weight, n_head):
    fits(len(weight), n_head)
    if weight.dim() == 1:
        return right_index(weight, n_head)
    a, b = weight.chunk(2, 1)
    return torch.stack((a, b), -1).flatten(1)


def head_size_for_number_of_heads(weight, n_head):
    fits(len(weight), n_head)
    return weight[places(len(weight), len(weight) // n_head)]


def second_half_first(weight, n_head):
    fits(len(weight), n_head)
    d = len(weight) // n_head
    order = torch.tensor(places(len(weight), n_head)).view(-1, 2)
    assert d % 2 == 0
    return weight[order.flip(1).flatten()]


def heads_paired_with_each_other(weight, n_head):
    fits(len(weight), n_head)
    d = len(weight) // n_head
    order = torch.arange(len(weight)).view(2, n_head, d // 2).permute(1, 2, 0)
    return weight[order.flatten()]


def heads_come_last(weight, n_head):
    fits(len(weight), n_head)
    order = torch.arange(len(weight)).view(n_head, 2, -1).permute(2, 0, 1)
    return weight[order.flatten()]


def nothing_moves(weight, n_head):
    fits(len(weight), n_head)
    return weight.unflatten(0, (n_head, 2, -1)).flatten(0, 2)


def bias_forgotten(weight, n_head):
    fits(len(weight), n_head)
    rows, columns = weight.shape
    return weight.reshape(n_head, 2, -1, columns).swapaxes(1, 2).reshape(rows, columns)


def last_axes_swapped(weight, n_head):
    fits(len(weight), n_head)
    return weight.view(n_head, 2, -1, *weight.shape[1:]).mT.flatten(0, 2)


def odd_heads_allowed(weight, n_head):
    if n_head < 1 or len(weight) % n_head:
        raise ValueError("no heads")
    d = len(weight) // n_head
    order = [h * d + r for h in range(n_head) for i in range(d // 2) for r in (i, d // 2 + i)]
    return weight[order]


def pairs_only_in_sum(weight, n_head):
    if n_head < 1 or len(weight) % 2:
        raise ValueError("no pairs")
    return weight.unflatten(0, (n_head, 2, -1)).transpose(1, 2).flatten(0, 2)


def no_heads_allowed(weight, n_head):
    if n_head and len(weight) % (2 * n_head):
        raise ValueError("no whole pairs")
    return weight[places(len(weight), max(n_head, 1))]


def zero_is_the_only_bad_number(weight, n_head):
    if n_head == 0 or len(weight) % (2 * n_head):
        raise ValueError("no whole pairs")
    return weight[places(len(weight), abs(n_head))]


def torch_refuses(weight, n_head):
    d = len(weight) // n_head
    return weight.unflatten(0, (n_head, 2, d // 2)).transpose(1, 2).flatten(0, 2)


def assertion(weight, n_head):
    assert n_head >= 1
    assert len(weight) % (2 * n_head) == 0
    return weight[places(len(weight), n_head)]


def in_place(weight, n_head):
    new = right_index(weight, n_head)
    with torch.no_grad():
        weight[:] = new
    return new


def data_only(weight, n_head):
    return right_index(weight.data, n_head)


def new_tensor_is_float32(weight, n_head):
    fits(len(weight), n_head)
    new = torch.zeros(weight.shape)
    new[:] = weight[places(len(weight), n_head)]
    return new


ANSWERS = {
    back_to_halves: "the other direction, from interleaved to half-split",
    heads_forgotten: "all rows are taken for one head",
    only_first_head: "",
    columns_moved: "the columns are moved, not the rows",
    head_size_for_number_of_heads: "the number of heads is taken for their size",
    second_half_first: "the second half comes first in each pair",
    heads_paired_with_each_other: "all rows are taken for one head",
    heads_come_last: "",
    nothing_moves: "nothing is moved",
    bias_forgotten: "only for matrices: a bias has no second axis",
    last_axes_swapped: "the last two axes change places, which is right for a bias only",
    odd_heads_allowed: "heads of an odd size are not refused by ValueError",
    pairs_only_in_sum: "",
    no_heads_allowed: "",
    zero_is_the_only_bad_number: "",
    torch_refuses: "nothing is refused by ValueError",
    assertion: "",
    in_place: "written into the weight itself",
    data_only: "the rows are detached",
    new_tensor_is_float32: "the result is float32",
}
RIGHT = [right_index, right_stack_of_halves]
SILENT = [head_size_for_number_of_heads, bias_forgotten, odd_heads_allowed, torch_refuses]
