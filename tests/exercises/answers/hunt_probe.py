"""Other right answers to hunt_probe."""

import torch

PAD, ASK = 0, 1


def by_cut(model, stories):
    """The model never sees the last column."""
    T = max(map(len, stories))
    ids = torch.full((len(stories), T), PAD)
    for row, story in zip(ids, stories):
        row[: len(story)] = torch.tensor(story)
    before, after = ids[:, :-1], ids[:, 1:]
    rows, places = (before == ASK).nonzero(as_tuple=True)
    return model(before)[rows, places], after[rows, places]


def by_story(model, stories):
    """Each story alone, without padding."""
    states, answers = [], []
    for story in stories:
        read = model(torch.tensor([story]))[0]
        for place, token in enumerate(story):
            if token == ASK:
                states.append(read[place])
                answers.append(story[place + 1])
    return torch.stack(states), torch.tensor(answers)


def by_roll(model, stories):
    """The tokens are rolled, the states stay."""
    rows = [torch.tensor(story) for story in stories]
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=PAD)
    asked = ids == ASK
    return model(ids)[asked], ids.roll(-1, dims=1)[asked]


def by_flat(model, stories):
    """Indices into one long row."""
    T = max(len(story) for story in stories)
    ids = torch.tensor([[*story, *[PAD] * (T - len(story))] for story in stories])
    flat = ids.flatten()
    at = torch.where(flat == ASK)[0]
    return [model(ids).flatten(0, 1).index_select(0, at), flat[at + 1]]


RIGHT = [by_cut, by_story, by_roll, by_flat]

SURVIVORS = {}
