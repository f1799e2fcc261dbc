"""A league: every method against a truth that is known.

A method is one function. It is given a model, the number of a place of the stream, and the states
that the model has there at the last token before a room must be said, with the right rooms. It
returns two functions: ``read`` names the rooms of new states, -1 where it abstains, and ``write``
changes states so that they say other rooms. Three numbers judge it on new stories:

==================  ================================================================
facts recovered     the share of all stories whose room it names
false claims        the share of the rooms that it names that are wrong
flips               the share of all stories in which the model says another room,
                    drawn by chance, after the method has written it
==================  ================================================================

All methods are given the same stories. The floor is a guess that knows which rooms the story names
and writes nothing. The mark for writing is :func:`other_story`: a state that the model itself has
where the other room is right.

Sources: Hewitt, Liang, *Designing and Interpreting Probes with Control Tasks*, 2019,
arXiv:1909.03368; Wu et al., *AxBench: Steering LLMs? Even Simple Baselines Outperform Sparse
Autoencoders*, 2025, arXiv:2501.17148.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from lm_from_scratch.cache.growing import GrowingCache
from lm_from_scratch.inside.dictionary import Dictionary, match
from lm_from_scratch.inside.lens import Lens
from lm_from_scratch.inside.probe import fit_probe
from lm_from_scratch.inside.sites import Edit, Site, edited, one_stream, stream_sites, wide
from lm_from_scratch.limits import Count, require
from lm_from_scratch.models.interface import CausalLM
from lm_from_scratch.models.modes import evaluating
from lm_from_scratch.text.asked import Questions, asked, batch
from lm_from_scratch.text.story_grammar import ROOMS
from lm_from_scratch.text.tokenizer import Tokenizer

#: From states (N, C) to the rooms (N,) that they say, -1 for none.
Read = Callable[[Tensor], Tensor]
#: From states (N, C) and rooms (N,) to states (N, C) that say these rooms.
Write = Callable[[Tensor, Tensor], Tensor]
#: Model, place, states (N, C) and rooms (N,) of labelled stories.
Method = Callable[[CausalLM, int, Tensor, Tensor], tuple[Read, Write]]


class Slots:
    """Some stories that a model has read up to the last token before their rooms. ``states``
    (L + 1, N, C) are those of that token, at every place of the stream."""

    def __init__(self, model: CausalLM, questions: Questions) -> None:
        one_stream(model)
        device = next(model.parameters()).device
        questions = Questions(**{k: x.to(device) for k, x in vars(questions).items()})
        self.model, self.questions = model, questions
        self.cache = GrowingCache(model.config.n_layer)
        past, places = questions.idx[:, :-1], questions.positions[:, :-1]
        with evaluating(model):  # a few columns at a time: large tensors take longer to allocate
            for idx, positions in zip(past.split(8, 1), places.split(8, 1), strict=True):
                model.backbone(idx, positions=positions, cache=self.cache)
        self.before = self.cache.lengths
        kept: list[Tensor] = []

        def keep(x: Tensor) -> Tensor:
            kept.append(x[:, 0])
            return x

        self.said = self._say(dict.fromkeys(stream_sites(model), keep))
        self.states = wide(torch.stack(kept))

    def _say(self, edits: Mapping[Site, Edit]) -> Tensor:
        idx, positions = self.questions.idx[:, -1:], self.questions.positions[:, -1:]
        try:
            with evaluating(self.model), edited(self.model, edits):
                logits = self.model(idx, positions=positions, cache=self.cache)
        finally:  # the stories are read once, and serve for every edit
            self.cache.crop(self.before)
        return self.questions.said(logits)

    def said_with(self, layer: int, states: Tensor) -> Tensor:
        """The rooms (N,) that the model says if its states at a place are these (N, C)."""
        return self._say({Site("stream", layer): lambda x: states[:, None].to(x)})


@dataclass(frozen=True)
class Round:
    """Stories whose rooms the methods are told, and new ones."""

    labelled: Slots
    new: Slots
    others: Tensor  # (N,) of each new story a room that is not right, to be written
    guess: float  # how often a room that is drawn from those that the story names is right


def rounds(
    model: CausalLM,
    tokenizer: Tokenizer,
    seeds: int = 3,
    labelled: int = 600,
    new: int = 200,
    first: int = 0,
) -> list[Round]:
    """A round for each seed from ``first`` on, with other stories in each. Raises ``ValueError``
    where no labelled story ends in one of the rooms."""
    require(Count, seeds=seeds, labelled=labelled, new=new)
    found = []
    for seed in range(first, first + seeds):
        known, unknown = asked(labelled, 2 * seed), asked(new, 2 * seed + 1)
        slots = [Slots(model, batch(stories, tokenizer)) for stories in (known, unknown)]
        if len(slots[0].questions.rooms.unique()) < len(ROOMS):
            raise ValueError(f"labelled={labelled} stories do not end in all {len(ROOMS)} rooms")
        right = slots[1].questions.rooms
        generator = torch.Generator().manual_seed(seed)
        others = right + torch.randint(1, len(ROOMS), right.shape, generator=generator).to(right)
        named = [sum(room in story.text for room in ROOMS) for story in unknown]
        guess = sum(1 / n for n in named) / new
        found.append(Round(slots[0], slots[1], others % len(ROOMS), guess))
    return found


class Row(NamedTuple):
    """What a method reached at a place: a number for each round."""

    method: str
    layer: int
    recovered: list[float]
    false_claims: list[float]  # 0 if it claims nothing
    flips: list[list[float]]  # for each size


def league(
    stories: list[Round],
    methods: Mapping[str, Method],
    layer: int,
    sizes: Sequence[float | None] = (None, 1),
) -> list[Row]:
    """The table of some methods at one place; its first row is the guess.

    Flips depend on how far a state is moved. Each size gives a column: ``None`` is the state as the
    method wrote it, 2 a change in the same direction, scaled to twice the length of the state.
    """
    silent = [share(s.new.said == s.others) for s in stories]
    floor = [s.guess for s in stories]
    rows = [Row("guess", layer, floor, [1 - x for x in floor], [silent] * len(sizes))]
    for name, method in methods.items():
        row = Row(name, layer, [], [], [[] for _ in sizes])
        for s in stories:
            known, x, right = s.labelled, s.new.states[layer], s.new.questions.rooms
            read, write = method(s.new.model, layer, known.states[layer], known.questions.rooms)
            claimed = read(x)
            row.recovered.append(share(claimed == right))
            some = claimed >= 0
            row.false_claims.append(share(claimed[some] != right[some]))
            step = write(x, s.others) - x
            for size, flips in zip(sizes, row.flips, strict=True):
                long = size and F.normalize(step, dim=-1) * size * x.norm(dim=-1, keepdim=True)
                said = s.new.said_with(layer, x + (step if long is None else long))
                flips.append(share(said == s.others))
        rows.append(row)
    return rows


def as_json(rows: Sequence[Row]) -> str:
    """The rows as JSON: a list of objects."""
    return json.dumps([row._asdict() for row in rows], indent=1)


def share(true: Tensor) -> float:
    """The share of ``true`` (N,) that is; 0 of nothing."""
    return true.double().mean().item() if len(true) else 0.0


def linear(weight: Tensor, states: Tensor, rooms: Tensor) -> Write:
    """The write of whoever reads scores ``states @ weight``, weight (C, 8): the smallest change of
    a state after which it has the mean scores of the room's own ``states`` (N, C), whose ``rooms``
    are (N,)."""
    scores = states @ weight
    typical = torch.stack([scores[rooms == room].mean(0) for room in range(weight.shape[1])])
    back = torch.linalg.pinv(weight)  # (8, C)
    return lambda x, new: x + (typical[new] - x @ weight) @ back


def probe(model: CausalLM, layer: int, states: Tensor, rooms: Tensor) -> tuple[Read, Write]:
    """A linear probe of ``states`` (N, C) for ``rooms`` (N,). It abstains where no room has half of
    the probability."""
    found = fit_probe(states, rooms, len(ROOMS), decay=1e-2, steps=60)

    def read(x: Tensor) -> Tensor:
        sure, room = found(x).softmax(-1).max(-1)
        return torch.where(sure > 0.5, room, -1)

    return read, linear(found.weight / found.scale[:, None], states, rooms)


def mean_difference(
    model: CausalLM, layer: int, states: Tensor, rooms: Tensor
) -> tuple[Read, Write]:
    """The mean of a room's ``states`` (N, C), by ``rooms`` (N,), minus the mean of all: a direction
    for each room. A state says the room whose direction is closest to its own."""
    middle = states.mean(0)
    means = torch.stack([states[rooms == room].mean(0) for room in range(len(ROOMS))])
    weight = F.normalize(means - middle, dim=-1).T
    return lambda x: ((x - middle) @ weight).argmax(-1), linear(weight, states, rooms)


def through_lens(lens: Lens, words: Tensor) -> Method:
    """What a lens says, of which ``words`` (8,) are the rooms. It abstains where the likeliest word
    is no room. It writes along the directions that raise the words, to first order."""

    def method(model: CausalLM, layer: int, states: Tensor, rooms: Tensor) -> tuple[Read, Write]:
        with torch.enable_grad():
            middle = states.mean(0).requires_grad_(True)
            said = lens(layer, middle)[words]
            rows = [torch.autograd.grad(one, middle, retain_graph=True)[0] for one in said]

        def read(x: Tensor) -> Tensor:
            word = lens(layer, x).argmax(-1)[:, None] == words  # (N, 8)
            return torch.where(word.any(-1), word.long().argmax(-1), -1)

        return read, linear(torch.stack(rows, -1), states, rooms)

    return method


def through_features(fitted: Mapping[int, Dictionary]) -> Method:
    """The features of the dictionary of a place that fit the rooms best. It names the room whose
    feature is the most active, compared with how active it usually is, and abstains where none is;
    it writes by switching one feature on and the others off."""

    def method(model: CausalLM, layer: int, states: Tensor, rooms: Tensor) -> tuple[Read, Write]:
        dictionary = fitted[layer]
        features = dictionary.encode(states)
        facts = F.one_hot(rooms, len(ROOMS)).bool()
        chosen = match(features, facts).feature  # (8,)
        active = torch.where(facts, features[:, chosen], 0.0)
        usual = active.sum(0) / (active > 0).sum(0).clamp(min=1)

        def read(x: Tensor) -> Tensor:
            values = dictionary.encode(x)[:, chosen] / usual  # of no use where it was never active
            values = torch.where(usual > 0, values, 0.0)
            return torch.where(values.amax(-1) > 0, values.argmax(-1), -1)

        def write(x: Tensor, new: Tensor) -> Tensor:
            before = dictionary.encode(x)
            after = before.clone()
            after[:, chosen] = 0.0
            after[torch.arange(len(x)), chosen[new]] = usual[new]
            return x + (after - before) @ dictionary.directions

        return read, write

    return method


def other_story(model: CausalLM, layer: int, states: Tensor, rooms: Tensor) -> tuple[Read, Write]:
    """Reads the room whose mean of ``states`` (N, C), by ``rooms`` (N,), is nearest. In place of a
    whole state it writes that of the labelled story nearest to the mean of the new room."""
    means = torch.stack([states[rooms == room].mean(0) for room in range(len(ROOMS))])
    far = torch.cdist(means, states).masked_fill(
        torch.arange(len(ROOMS), device=rooms.device)[:, None] != rooms, float("inf")
    )
    typical = states[far.argmin(-1)]  # (8, C)
    return lambda x: torch.cdist(x, means).argmin(-1), lambda x, new: typical[new]
