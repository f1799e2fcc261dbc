"""Answers to pooling, written from its text by a second person."""

import torch


def row_by_row(x, positions=None):
    """Right: walks back from the end of each row."""
    B, T, _ = x.shape
    if positions is not None and positions.shape != (B, T):
        raise ValueError("positions")
    out = []
    for b in range(B):
        t = T - 1
        while positions is not None and t > 0 and positions[b, t] < 0:
            t -= 1
        out.append(x[b, t])
    return torch.stack(out)


def at(x, positions, choose):
    """The states at the columns that `choose` finds."""
    if positions is None:
        return x[:, -1]
    if positions.shape != x.shape[:2]:
        raise ValueError("positions (B, T)")
    return x[torch.arange(len(x)), choose(positions)]


def last_column(x, positions=None):
    return at(x, positions, lambda p: p.shape[1] - 1)


def largest_position(x, positions=None):
    return at(x, positions, lambda p: p.argmax(dim=1))


def position_as_column(x, positions=None):
    return at(x, positions, lambda p: p.amax(1).clamp(0, p.shape[1] - 1))


def number_of_tokens_as_column(x, positions=None):
    return at(x, positions, lambda p: ((p >= 0).sum(1) - 1).clamp(min=0))


def padding_counted_from_the_right_end(x, positions=None):
    return at(x, positions, lambda p: p.shape[1] - 1 - (p < 0).sum(1))


def position_zero_is_padding(x, positions=None):
    return at(x, positions, lambda p: ((p > 0) * torch.arange(1, p.shape[1] + 1)).argmax(1))


def first_token(x, positions=None):
    return at(x, positions, lambda p: (p >= 0).int().argmax(1))


def before_the_first_padding(x, positions=None):
    return at(x, positions, lambda p: ((p < 0).int().argmax(1) - 1) % p.shape[1])


def first_column_without_positions(x, positions=None):
    return x[:, 0] if positions is None else row_by_row(x, positions)


def one_hot_sum(x, positions=None):
    if positions is None:
        return x[:, -1]
    if positions.shape != x.shape[:2]:
        raise ValueError
    column = ((positions >= 0) * torch.arange(1, x.shape[1] + 1)).argmax(1)
    hot = torch.nn.functional.one_hot(column, x.shape[1]).to(x.dtype)
    return torch.einsum("bt,btc->bc", hot, x)


def mean_of_the_tokens(x, positions=None):
    if positions is None:
        return x.mean(1)
    if positions.shape != x.shape[:2]:
        raise ValueError
    real = (positions >= 0)[..., None]
    return torch.where(real, x, 0).sum(1) / real.sum(1).clamp(min=1).to(x.dtype)


def padding_alone_crashes(x, positions=None):
    if positions is None:
        return x[:, -1]
    if positions.shape != x.shape[:2]:
        raise ValueError
    return torch.stack([row[p >= 0][-1] for row, p in zip(x, positions, strict=True)])


def same_size_is_enough(x, positions=None):
    if positions is not None:
        positions = positions.reshape(x.shape[:2])
    return row_by_row(x, positions)


def shape_not_looked_at(x, positions=None):
    if positions is None:
        return x[:, -1]
    columns = torch.arange(x.shape[1]).masked_fill(positions < 0, -1).amax(-1)
    return x[torch.arange(x.shape[0]), columns]


def one_column_for_the_batch(x, positions=None):
    return at(x, positions, lambda p: (p >= 0).any(0).nonzero().max())


def axis_kept(x, positions=None):
    return row_by_row(x, positions).unsqueeze(1)


def all_rows_for_each_row(x, positions=None):
    if positions is not None and positions.shape != x.shape[:2]:
        raise ValueError
    if positions is None:
        return x[:, -1]
    return x[:, ((positions >= 0) * torch.arange(1, x.shape[1] + 1)).argmax(1)]


def float32_returned(x, positions=None):
    return row_by_row(x.float(), positions)


def copied_by_item(x, positions=None):
    return torch.tensor(row_by_row(x, positions).tolist(), dtype=x.dtype)


def padding_overwritten(x, positions=None):
    out = row_by_row(x, positions).clone()
    with torch.no_grad():
        x.nan_to_num_(0.0)
    return out


def nan_replaced_in_the_result(x, positions=None):
    return last_column(x, positions).nan_to_num(0.0)


def as_many_positions_are_enough(x, positions=None):
    if positions is not None and positions.numel() != x.shape[0] * x.shape[1]:
        raise ValueError("positions do not fit")
    return row_by_row(x, None if positions is None else positions.reshape(x.shape[:2]))


ANSWERS = {
    last_column: "the last column, whatever it holds",
    largest_position: "the token with the largest position, not the rightmost",
    position_as_column: "the largest position is taken for a column",
    number_of_tokens_as_column: "the tokens are counted: right for padding on the right alone",
    padding_counted_from_the_right_end: (
        "the tokens are counted: right for padding on the right alone"
    ),
    position_zero_is_padding: "position 0 is taken for padding",
    first_token: "the first real token, which has read nothing",
    before_the_first_padding: (
        "the token before the first padding, or the last column if padding comes first"
    ),
    first_column_without_positions: "",
    one_hot_sum: "the padding is multiplied by 0, and NaN stays",
    mean_of_the_tokens: "the mean of all real tokens",
    padding_alone_crashes: "a row without a token is not expected",
    same_size_is_enough: "",
    shape_not_looked_at: "positions of any shape are accepted",
    one_column_for_the_batch: "one column for the whole batch",
    axis_kept: "the axis of the tokens is kept",
    all_rows_for_each_row: "x[:, columns] takes all columns from every row",
    float32_returned: "the result is float32",
    copied_by_item: "the states are detached",
    padding_overwritten: "the states of padding are overwritten in x itself",
    nan_replaced_in_the_result: "the last column, whatever it holds",
    as_many_positions_are_enough: "only the number of positions is compared",
}
RIGHT = [row_by_row]
SILENT = [one_hot_sum, padding_alone_crashes, shape_not_looked_at]
