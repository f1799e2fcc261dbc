"""Answers to visibility: other right ones, and wrong ones of a second person."""

import torch


def by_loop(q, k, window=None, qd=None, kd=None):
    """One pair at a time, with sets of positions."""
    if window is not None and window <= 0:
        raise ValueError("window")
    B, T, S = max(len(q), len(k)), q.shape[1], k.shape[1]
    mask = torch.zeros(B, 1, T, S, dtype=torch.bool)
    for b in range(B):
        for t in range(T):
            at = int(q[b % len(q), t])
            oldest = 0 if window is None else max(0, at - window + 1)
            for s in range(S):
                same = qd is None or qd[b % len(qd), t] == kd[b % len(kd), s]
                mask[b, 0, t, s] = bool(same) and int(k[b % len(k), s]) in range(oldest, at + 1)
    return mask


def by_distance(q, k, window=None, qd=None, kd=None):
    """How far back each key is."""
    if window is not None and not window > 0:
        raise ValueError("window")
    back = q.unsqueeze(2) - k.unsqueeze(1)
    hidden = (back < 0) | (k.unsqueeze(1) == -1) | (q.unsqueeze(2) == -1)
    if window:
        hidden |= back >= window
    if qd is not None:
        hidden |= qd.unsqueeze(2) != kd.unsqueeze(1)
    return hidden.logical_not().unsqueeze(1)


def by_sentinel(q, k, window=None, qd=None, kd=None):
    """Padding keys are moved into the far future, where the causal condition hides them."""
    if window is not None and window < 1:
        raise ValueError("window")
    far = torch.iinfo(torch.int64).max
    k = torch.where(k < 0, far, k)[:, None]
    q = q[..., None]
    mask = k.le(q) & k.gt(q - (far if window is None else window))
    if qd is not None:
        mask = mask & qd[..., None].eq(kd[:, None])
    return mask[:, None]


def by_parts(q, k, window=None, qd=None, kd=None):
    """Four masks and their minimum."""
    if window is not None and window < 1:
        raise ValueError("window")
    T, S = q.shape[1], k.shape[1]
    q, k = torch.broadcast_tensors(q[:, :, None], k[:, None, :])
    parts = [k >= 0, k <= q]
    if window is not None:
        parts.append(k + window > q)
    if qd is not None and kd is not None:
        parts.append(qd[:, :, None].expand(-1, T, S) == kd[:, None, :].expand(-1, T, S))
    return torch.stack(parts).all(dim=0)[:, None]


RIGHT = [by_loop, by_distance, by_sentinel, by_parts]

IN_WINDOW = "    if window is not None:\n        mask = mask & (key > query - window)\n"
REFUSED = 'raise ValueError(f"window={window} must be at least 1")'

WRONG = [
    ("the window counts columns of visible keys, not positions",
     {IN_WINDOW: "", "    return mask": IN_WINDOW.replace(
         "key > query - window", "mask.flip(-1).cumsum(-1).flip(-1) <= window")
      + "    return mask"}, "the table's fails more cases"),
    ("the future is not hidden",
     {"(key <= query)": "(query >= 0)", "key > query - window": "(query - key).abs() < window"},
     "the table's fails more cases"),
    ("a padding query sees everything",
     {"query_positions[:": "query_positions.masked_fill(query_positions < 0, 10**9)[:"}),
    ("an assertion",
     {f"if window is not None and window < 1:\n        {REFUSED}":
      "assert window is None or window >= 1"}),
]  # fmt: skip
