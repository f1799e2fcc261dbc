"""Other right answers to hunt_answer_mask."""

import torch

from lm_from_scratch.exercises.catalogue.hunt_answer_mask.checks import (
    ASSISTANT,
    END,
    START,
    answers,
)
from lm_from_scratch.text.targets import IGNORE


def filled(chats):
    rows = [torch.tensor(chat) for chat in chats]
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=END)


def by_labels(chats):
    """Labels where the tokens stand, shifted as a whole at the end."""
    T = max(map(len, chats))
    rows = []
    for ids in chats:
        labels = [i if learned else IGNORE for i, learned in zip(ids, answers(ids), strict=True)]
        rows.append(labels[1:] + [IGNORE] * (T + 1 - len(ids)))
    return {"input_ids": filled(chats), "targets": torch.tensor(rows)}


def by_turns(chats):
    """Turn by turn: from one START to the next."""
    ids = filled(chats)
    targets = torch.full_like(ids, IGNORE)
    for row, given in zip(targets, chats, strict=True):
        starts = [i for i, token in enumerate(given) if token == START]
        for start, following in zip(starts, [*starts[1:], len(given)], strict=True):
            if given[start + 1 : start + 2] == [ASSISTANT]:
                words = given[start + 2 : following]
                row[start + 1 : start + 1 + len(words)] = torch.tensor(words, dtype=torch.long)
    return {"input_ids": ids, "targets": targets}


def by_last_start(chats):
    """For the whole batch at once: the role after the last START before each token."""
    ids = filled(chats)
    T = ids.shape[1]
    places = torch.arange(T).expand_as(ids)
    real = places < torch.tensor([len(chat) for chat in chats])[:, None]
    start = torch.where(ids == START, places, -1).cummax(1).values
    role = ids.gather(1, (start + 1).clamp(max=T - 1))
    learned = real & (start >= 0) & (role == ASSISTANT) & (places > start + 1)
    labels = torch.where(learned, ids, IGNORE)
    edge = torch.full((len(ids), 1), IGNORE)
    return {"targets": torch.cat([labels[:, 1:], edge], dim=1), "input_ids": ids}


def by_words(chats):
    """From the back: a token counts if the nearest role before it is the assistant's."""
    targets = []
    T = max(map(len, chats))
    for ids in chats:
        row = [IGNORE] * T
        for t in range(1, len(ids)):
            before = ids[:t]
            if ids[t] != START and START in before:
                at = t - 1 - before[::-1].index(START)
                if at < t - 1 and ids[at + 1] == ASSISTANT:
                    row[t - 1] = ids[t]
        targets.append(row)
    return {"input_ids": filled(chats), "targets": torch.tensor(targets)}


RIGHT = [by_labels, by_turns, by_last_start, by_words]

SURVIVORS = {
    "for place in range(1, len(chat)):: 1 => 0": (
        "the first token begins a turn: it is in no answer"
    )
}
