"""Answers to rope_layouts: other right ones, and wrong ones of a second person."""

import torch


def _checked(weight, n_head):
    if n_head < 1 or weight.shape[0] % (2 * n_head):
        raise ValueError("no whole pairs")
    return weight.shape[0] // n_head


def by_index(weight, n_head):
    """The numbers of the rows are moved, then the rows are taken."""
    dim = _checked(weight, n_head)
    order = torch.stack([torch.arange(dim // 2), torch.arange(dim // 2, dim)], dim=1).flatten()
    return weight[(order + dim * torch.arange(n_head)[:, None]).flatten()]


def by_slices(weight, n_head):
    """Every second row of a new tensor."""
    dim = _checked(weight, n_head)
    heads = weight.reshape(n_head, dim, -1)
    new = torch.empty_like(heads)
    new[:, 0::2], new[:, 1::2] = heads[:, : dim // 2], heads[:, dim // 2 :]
    return new.reshape(weight.shape)


def by_stack(weight, n_head):
    """Head by head, the two halves side by side."""
    _checked(weight, n_head)
    done = [torch.stack(head.chunk(2), dim=1).reshape(head.shape) for head in weight.chunk(n_head)]
    return torch.cat(done)


def by_matrix(weight, n_head):
    """A matrix of zeros and ones for one head."""
    dim = _checked(weight, n_head)
    half = dim // 2
    matrix = torch.zeros(dim, dim, dtype=weight.dtype)
    for i in range(half):
        matrix[2 * i, i] = matrix[2 * i + 1, half + i] = 1
    return torch.cat([matrix @ head for head in weight.split(dim)])


def by_loop(weight, n_head):
    """Row by row."""
    dim = _checked(weight, n_head)
    rows = []
    for start in range(0, len(weight), dim):
        for i in range(dim // 2):
            rows += [weight[start + i], weight[start + dim // 2 + i]]
    return torch.stack(rows)


RIGHT = [by_index, by_slices, by_stack, by_matrix, by_loop]

TEST = "n_head < 1 or rows % (2 * n_head) != 0"
REFUSED = 'raise ValueError(f"{rows} rows cannot be {n_head} heads of whole pairs")'
MOVED = "heads.transpose(1, 2).flatten(0, 2)"

WRONG = [
    ("only the first head",
     {f"return {MOVED}": "first = heads[:1].transpose(1, 2).flatten(0, 2)\n"
      "    return torch.cat([first, weight[len(first) :]])"}),
    ("the columns are moved, not the rows",
     {f"return {MOVED}": "if weight.dim() > 1:\n        return weight.unflatten(1, (2, -1))"
      f".transpose(1, 2).flatten(1)\n    return {MOVED}"}),
    ("heads come last", {MOVED: "heads.movedim(2, 0).flatten(0, 2)"}),
    ("no heads are one head",
     {TEST: "n_head and rows % (2 * n_head)", "(n_head, 2, -1)": "(max(n_head, 1), 2, -1)"}),
    ("0 is the only bad number",
     {"n_head < 1": "n_head == 0", "(n_head, 2, -1)": "(abs(n_head), 2, -1)"}),
    ("an assertion",
     {f"if {TEST}:\n        {REFUSED}": "assert n_head >= 1 and rows % (2 * n_head) == 0"}),
]  # fmt: skip
