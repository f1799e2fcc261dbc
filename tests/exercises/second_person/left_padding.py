"""Answers to left_padding, written from its text by a second person."""

import torch


def refuse(mask):
    if mask.ndim != 2 or not bool(((mask == 0) | (mask == 1)).all()):
        raise ValueError("a mask (B, T) of 0 and 1")


def token_by_token(attention_mask):
    """Right: a counter for each row."""
    refuse(attention_mask)
    B, T = attention_mask.shape
    positions, following = torch.full((B, T), -1), torch.zeros(B, dtype=torch.int64)
    for b in range(B):
        for t in range(T):
            if attention_mask[b, t] == 1:
                positions[b, t] = following[b]
                following[b] += 1
    return positions, following


def first_token_and_onward(attention_mask):
    refuse(attention_mask)
    m = attention_mask.long()
    pads = m.argmax(1, keepdim=True)
    where = torch.arange(m.shape[1]) - pads
    return torch.where(m == 1, where, -1), m.sum(1)


def padding_not_marked(attention_mask):
    refuse(attention_mask)
    m = attention_mask.long()
    return m.cumsum(1) - 1, m.sum(1)


def padding_gets_one(attention_mask):
    refuse(attention_mask)
    m = attention_mask.long()
    return (m.cumsum(-1) - 1).masked_fill(m == 0, 1), m.sum(-1)


def padding_gets_zero(attention_mask):
    refuse(attention_mask)
    m = attention_mask.long()
    return ((m.cumsum(-1) - 1) * m), m.sum(-1)


def columns_as_positions(attention_mask):
    refuse(attention_mask)
    T = attention_mask.size(1)
    where = torch.arange(T).expand_as(attention_mask)
    return where.masked_fill(attention_mask == 0, -1), attention_mask.long().sum(1)


def counted_from_one(attention_mask):
    refuse(attention_mask)
    m = attention_mask.long()
    positions = torch.where(m > 0, m.cumsum(1), -1)
    return positions, m.sum(1) + 1


def next_is_the_length(attention_mask):
    positions, _ = token_by_token(attention_mask)
    return positions, torch.full((len(positions),), positions.size(1))


def next_after_the_last_column(attention_mask):
    positions, _ = token_by_token(attention_mask)
    return positions, positions[:, -1] + 1


def next_is_the_last(attention_mask):
    positions, following = token_by_token(attention_mask)
    return positions, following - 1


def next_keeps_an_axis(attention_mask):
    positions, following = token_by_token(attention_mask)
    return positions, following[:, None]


def blind_row_goes_on_from_minus_one(attention_mask):
    positions, _ = token_by_token(attention_mask)
    last = positions.amax(1)
    return positions, torch.where(last < 0, last, last + 1)


def counted_in_the_type_of_the_mask(attention_mask):
    refuse(attention_mask)
    m = attention_mask
    count = m.cumsum(1, dtype=m.dtype if m.dtype != torch.bool else None).long()
    return torch.where(m.bool(), count - 1, -1), m.long().sum(1)


def next_in_the_type_of_the_mask(attention_mask):
    refuse(attention_mask)
    m = attention_mask.long()
    total = attention_mask.sum(1, dtype=attention_mask.dtype).long()
    return torch.where(m == 1, m.cumsum(1) - 1, -1), total


def int32_positions(attention_mask):
    positions, following = token_by_token(attention_mask)
    return positions.int(), following.int()


def down_the_columns(attention_mask):
    refuse(attention_mask)
    m = attention_mask.long()
    return (m.cumsum(0) - 1).masked_fill(m == 0, -1), m.sum(1)


def nothing_refused(attention_mask):
    m = (attention_mask != 0).long()
    return (m.cumsum(-1) - 1).masked_fill(m == 0, -1), m.sum(-1)


def only_the_axes_refused(attention_mask):
    if attention_mask.dim() != 2:
        raise ValueError("two axes")
    m = attention_mask.bool().long()
    return (m.cumsum(-1) - 1).masked_fill(m == 0, -1), m.sum(-1)


def only_large_numbers_refused(attention_mask):
    if attention_mask.dim() != 2 or (attention_mask.numel() and attention_mask.max() > 1):
        raise ValueError("two axes, 0 and 1")
    m = attention_mask.eq(1).long()
    return (m.cumsum(-1) - 1).masked_fill(m == 0, -1), m.sum(-1)


def smallest_and_largest_looked_at(attention_mask):
    if attention_mask.dim() != 2 or attention_mask.min() < 0 or attention_mask.max() > 1:
        raise ValueError("two axes, 0 and 1")
    m = attention_mask.long()
    return (m.cumsum(-1) - 1).masked_fill(m == 0, -1), m.sum(-1)


def both_numbers_demanded(attention_mask):
    if attention_mask.dim() != 2 or attention_mask.unique().tolist() != [0, 1]:
        raise ValueError("a mask holds 0 and 1")
    return token_by_token(attention_mask)


def tokens_and_padding_swapped(attention_mask):
    refuse(attention_mask)
    return token_by_token(attention_mask == 0)


def next_left_out(attention_mask):
    return token_by_token(attention_mask)[0]


def next_summed_in_the_mask(attention_mask):
    refuse(attention_mask)
    m = attention_mask.bool()
    return (m.cumsum(1) - 1).masked_fill(~m, -1), attention_mask.sum(1).to(torch.int64)


ANSWERS = {
    first_token_and_onward: "columns are counted from the first token on, also those of padding",
    padding_not_marked: "the running count is kept where a token is followed by padding",
    padding_gets_one: "padding gets position 1, as in some libraries",
    padding_gets_zero: "padding gets position 0, and so is taken for a first token",
    columns_as_positions: "positions are columns, and only the next one is counted",
    counted_from_one: "positions start at 1, and the next one is one more",
    next_is_the_length: "the next token stands at the number of columns, padding included",
    next_after_the_last_column: "the next token is read from the last column, which may be padding",
    next_is_the_last: "the position of the last token in the place of the next one",
    next_keeps_an_axis: "the next positions keep an axis of size 1",
    blind_row_goes_on_from_minus_one: "a row of padding alone goes on at -1",
    counted_in_the_type_of_the_mask: "counted in the dtype of the mask, which is too small",
    next_in_the_type_of_the_mask: (
        "the next position is summed in the dtype of the mask, which is too small"
    ),
    int32_positions: "",
    down_the_columns: "counted down the columns, over the rows of the batch",
    nothing_refused: "nothing is refused",
    only_the_axes_refused: "any number is accepted, an additive mask too",
    only_large_numbers_refused: "only numbers above 1 are refused: an additive mask has none",
    smallest_and_largest_looked_at: "only the smallest and the largest number are looked at",
    both_numbers_demanded: "",
    tokens_and_padding_swapped: "0 is taken for a token and 1 for padding",
    next_left_out: "",
    next_summed_in_the_mask: (
        "the next position is summed in the dtype of the mask, which is too small"
    ),
}
RIGHT = [token_by_token]
SILENT = [counted_in_the_type_of_the_mask, next_in_the_type_of_the_mask]
