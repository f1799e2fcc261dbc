"""Other right answers to answer_targets."""

import torch

from lm_from_scratch.text.targets import IGNORE


def by_token(chats, spans, length):
    """Place by place."""
    rows = []
    for ids, pairs in zip(chats, spans, strict=True):
        row = []
        for t in range(1, length + 1):
            inside = t < min(len(ids), length) and any(a <= t <= b for a, b in pairs)
            row.append(ids[t] if inside else IGNORE)
        rows.append(row)
    return torch.tensor(rows)


def by_mask(chats, spans, length):
    """All is marked where it stands, and shifted at the end."""
    labels = torch.full((len(chats), length + 1), IGNORE)
    for row, ids, pairs in zip(labels, chats, spans, strict=True):
        text = torch.tensor(ids[:length])
        counts = torch.zeros(len(text), dtype=torch.bool)
        for start, end in pairs:
            counts[start : end + 1] = True
        row[: len(text)] = text.masked_fill(~counts, IGNORE)
    return labels[:, 1:].clone()


def by_where(chats, spans, length):
    """Comparisons of places, for the whole batch."""
    ids = torch.tensor([(c[:length] + [IGNORE] * (length + 1))[: length + 1] for c in chats])
    places = torch.arange(length + 1)
    answers = torch.zeros(ids.shape, dtype=torch.bool)
    for i, pairs in enumerate(spans):
        for start, end in pairs:
            answers[i] |= (places >= start) & (places <= end)
    return torch.where(answers, ids, IGNORE)[:, 1:]


def by_steps(chats, spans, length):
    """An answer begins with +1 and ends with -1: a running sum says where one is."""
    targets = torch.full((len(chats), length), IGNORE)
    for i, (ids, pairs) in enumerate(zip(chats, spans, strict=True)):
        steps = torch.zeros(len(ids) + 1, dtype=torch.long)
        for start, end in pairs:
            steps[start] += 1
            steps[end + 1] -= 1
        for t in steps.cumsum(0).nonzero().flatten().tolist():
            if 1 <= t < length:
                targets[i, t - 1] = ids[t]
    return targets


RIGHT = [by_token, by_mask, by_where, by_steps]
