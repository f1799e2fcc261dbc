"""Answers to visibility, written from its text by a second person."""

import torch


def in_pairs(query_positions, key_positions, window=None, query_documents=None, key_documents=None):
    """Right: one pair at a time, as the text has it."""
    if window is not None and window < 1:
        raise ValueError(f"a window of {window}")
    tables = [query_positions, key_positions]
    tables += [] if query_documents is None else [query_documents, key_documents]
    B = max(len(table) for table in tables)
    rows = [table.expand(B, -1).tolist() for table in tables]

    def sees(b, t, s):
        q, k = rows[0][b][t], rows[1][b][s]
        near = window is None or q - k < window
        together = len(rows) == 2 or rows[2][b][t] == rows[3][b][s]
        return q != -1 and k != -1 and k <= q and near and together

    T, S = query_positions.shape[1], key_positions.shape[1]
    return torch.tensor(
        [[[[sees(b, t, s) for s in range(S)] for t in range(T)]] for b in range(B)]
    ).view(B, 1, T, S)


def by_broadcast(q, k, window=None, qd=None, kd=None, /, *, near=None):
    if window is not None and window < 1:
        raise ValueError
    q, k = q.unsqueeze(-1), k.unsqueeze(-2)
    mask = (k <= q) & (k >= 0) & (q >= 0)
    if window is not None:
        mask = mask & near(q, k, window)
    if qd is not None:
        mask = mask & (qd.unsqueeze(-1) == kd.unsqueeze(-2))
    return mask.unsqueeze(1)


def window_without_own_key(
    query_positions, key_positions, window=None, query_documents=None, key_documents=None
):
    return by_broadcast(query_positions, key_positions, window, query_documents, key_documents,
                        near=lambda q, k, w: k >= q - w)  # fmt: skip


def window_one_too_small(
    query_positions, key_positions, window=None, query_documents=None, key_documents=None
):
    return by_broadcast(query_positions, key_positions, window, query_documents, key_documents,
                        near=lambda q, k, w: q - k < w - 1)  # fmt: skip


def window_over_columns(
    query_positions, key_positions, window=None, query_documents=None, key_documents=None
):
    def near(q, k, w):
        T, S = q.shape[-2], k.shape[-1]
        rows, columns = torch.arange(S - T, S)[:, None], torch.arange(S)
        return columns > rows - w

    return by_broadcast(query_positions, key_positions, window, query_documents, key_documents,
                        near=near)  # fmt: skip


def window_counts_visible_keys(
    query_positions, key_positions, window=None, query_documents=None, key_documents=None
):
    mask = in_pairs(query_positions, key_positions, None, query_documents, key_documents)
    if window is None:
        return mask
    if window < 1:
        raise ValueError
    after = mask.long().flip(-1).cumsum(-1).flip(-1)
    return mask & (after <= window)


def triangle_of_columns(
    query_positions, key_positions, window=None, query_documents=None, key_documents=None
):
    if window is not None and window < 1:
        raise ValueError
    q, k = query_positions[:, None, :, None], key_positions[:, None, None]
    T, S = q.shape[2], k.shape[3]
    mask = (k >= 0) & (q >= 0) & torch.ones(T, S, dtype=torch.bool).tril(S - T)
    if window is not None:
        mask = mask & (q - k < window)
    if query_documents is not None:
        mask = mask & (query_documents[:, None, :, None] == key_documents[:, None, None])
    return mask


def future_seen(
    query_positions, key_positions, window=None, query_documents=None, key_documents=None
):
    if window is not None and window < 1:
        raise ValueError
    q, k = query_positions[:, None, :, None], key_positions[:, None, None, :]
    mask = (k > -1) & (q > -1)
    if window is not None:
        mask = mask & ((q - k).abs() < window)
    if query_documents is not None:
        mask = mask & (query_documents[:, None, :, None] == key_documents[:, None, None, :])
    return mask


def own_key_not_seen(
    query_positions, key_positions, window=None, query_documents=None, key_documents=None
):
    mask = in_pairs(query_positions, key_positions, window, query_documents, key_documents)
    return mask & (query_positions[:, None, :, None] > key_positions[:, None, None, :])


def position_zero_is_padding(
    query_positions, key_positions, window=None, query_documents=None, key_documents=None
):
    mask = in_pairs(query_positions, key_positions, window, query_documents, key_documents)
    return mask & (key_positions > 0)[:, None, None, :]


def padding_queries_see(
    query_positions, key_positions, window=None, query_documents=None, key_documents=None
):
    late = query_positions.masked_fill(query_positions == -1, 10**9)
    return in_pairs(late, key_positions, window, query_documents, key_documents)


def padding_keys_seen(
    query_positions, key_positions, window=None, query_documents=None, key_documents=None
):
    q, k = query_positions[:, None, :, None], key_positions[:, None, None, :]
    mask = (k <= q) & (q != -1)
    if window is not None:
        if window < 1:
            raise ValueError("window")
        mask = mask & (q - k < window)
    if query_documents is not None:
        mask = mask & (query_documents[:, None, :, None] == key_documents[:, None, None, :])
    return mask


def earlier_documents_too(
    query_positions, key_positions, window=None, query_documents=None, key_documents=None
):
    mask = in_pairs(query_positions, key_positions, window)
    if query_documents is None:
        return mask
    return mask & (key_documents[:, None, None] <= query_documents[:, None, :, None])


def document_zero_is_padding(
    query_positions, key_positions, window=None, query_documents=None, key_documents=None
):
    mask = in_pairs(query_positions, key_positions, window, query_documents, key_documents)
    return mask if key_documents is None else mask & (key_documents > 0)[:, None, None]


def documents_left_out(
    query_positions, key_positions, window=None, query_documents=None, key_documents=None
):
    return in_pairs(query_positions, key_positions, window)


def window_zero_is_none(
    query_positions, key_positions, window=None, query_documents=None, key_documents=None
):
    if window and window < 0:
        raise ValueError("negative window")
    return in_pairs(query_positions, key_positions, window or None, query_documents, key_documents)


def window_asserted(
    query_positions, key_positions, window=None, query_documents=None, key_documents=None
):
    assert window is None or window >= 1
    return in_pairs(query_positions, key_positions, window, query_documents, key_documents)


def axis_of_heads_left_out(
    query_positions, key_positions, window=None, query_documents=None, key_documents=None
):
    return in_pairs(query_positions, key_positions, window, query_documents, key_documents)[:, 0]


def keys_before_queries(
    query_positions, key_positions, window=None, query_documents=None, key_documents=None
):
    return in_pairs(
        query_positions, key_positions, window, query_documents, key_documents
    ).transpose(2, 3)


def rows_of_the_queries_only(
    query_positions, key_positions, window=None, query_documents=None, key_documents=None
):
    B = query_positions.shape[0]
    return in_pairs(query_positions, key_positions, window, query_documents, key_documents)[:B]


def rows_of_the_keys_only(
    query_positions, key_positions, window=None, query_documents=None, key_documents=None
):
    B = key_positions.shape[0]
    return in_pairs(query_positions, key_positions, window, query_documents, key_documents)[:B]


def only_zero_refused(
    query_positions, key_positions, window=None, query_documents=None, key_documents=None
):
    if window == 0:
        raise ValueError("a window of nothing")
    return by_broadcast(query_positions, key_positions, window and max(window, 1),
                        query_documents, key_documents, near=lambda q, k, w: q - k < w)  # fmt: skip


def window_or_documents(
    query_positions, key_positions, window=None, query_documents=None, key_documents=None
):
    if query_documents is not None:
        return in_pairs(query_positions, key_positions, None, query_documents, key_documents)
    return in_pairs(query_positions, key_positions, window)


ANSWERS = {
    rows_of_the_keys_only: "as many rows as the keys have",
    window_without_own_key: "a window of W + 1 keys: the query's own is not counted",
    window_one_too_small: "a window of W - 1 keys",
    window_over_columns: "the window by columns, the rest by positions",
    window_counts_visible_keys: "the window counts columns of visible keys, not positions",
    triangle_of_columns: "the future by columns, the rest by positions",
    future_seen: "the future is not hidden",
    own_key_not_seen: "a query does not see its own key",
    position_zero_is_padding: "position 0 is taken for padding",
    padding_queries_see: "",
    padding_keys_seen: "padding keys are visible",
    earlier_documents_too: "a document sees those with a lower number",
    document_zero_is_padding: "document 0 is hidden, as if it were padding",
    documents_left_out: "documents are not compared",
    window_zero_is_none: "a window of 0 is taken for none",
    window_asserted: "",
    axis_of_heads_left_out: "no axis for the heads",
    keys_before_queries: "rows are keys and columns are queries",
    rows_of_the_queries_only: "as many rows as the queries have",
    only_zero_refused: "only a window of 0 is refused",
    window_or_documents: "the window is forgotten where there are documents",
}
RIGHT = [in_pairs]
