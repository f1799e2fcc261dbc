"""Stories that end where a room must be said: what is true there is known.

``Mia has the key. Mia goes to the kitchen. Where is the key? Mia has the key, in the`` ends at the
one token after which a model has to know where the key is. A batch of such stories is what a
model reads, with the right room of each. :func:`counterfactual` is the same story in which one
word differs and another room is right, and :func:`two_questions` asks one story about two people.
"""

from dataclasses import dataclass
from random import Random

import torch
from torch import Tensor

from lm_from_scratch.limits import Count, require
from lm_from_scratch.text.batch import padded_batch
from lm_from_scratch.text.plots import PlotConfig, choose, make_plot
from lm_from_scratch.text.story_grammar import BOXES, PEOPLE, ROOMS, THINGS, Sentence, write
from lm_from_scratch.text.tokenizer import Tokenizer
from lm_from_scratch.text.worlds import World

#: Stories in which the model ``worlds`` mostly finds the room: two people, three rooms, one box.
SMALL = PlotConfig(people=2, rooms=3, boxes=1, things=2, events=4, ask=0)


@dataclass(frozen=True)
class Asked:
    """A plot, and the thing or person whose room is asked for after it."""

    plot: tuple[Sentence, ...]
    what: str

    @property
    def world(self) -> World:
        """The world after the plot. Raises ``ValueError`` for one that cannot be."""
        world = World()
        for sentence in self.plot:
            world.follow(sentence)
        return world

    @property
    def chain(self) -> list[str]:
        """Where it is, from inside out: ``["box", "Tom", "kitchen"]``. Raises ``ValueError`` for a
        plot that cannot be."""
        world = self.world
        if self.what not in world.place:
            raise ValueError(f"the story has not mentioned {self.what}")
        return world.chain(self.what)

    @property
    def room(self) -> str:
        """The right room."""
        return self.chain[-1]

    @property
    def text(self) -> str:
        """The story, the question, and the answer up to its room."""
        world = self.world
        kind = "where is" if self.what in PEOPLE else "where"
        question = Sentence(kind, (self.what,))
        answer = write([world.answer(question)])
        room = world.chain(self.what)[-1]
        return f"{write([*self.plot, question])} {answer[: answer.rindex(room) - 1]}"


def asked(n: int, seed: int = 0, what: str = "key", config: PlotConfig = SMALL) -> list[Asked]:
    """``n`` stories about ``what``; those of another seed are others. Raises ``ValueError`` for
    what no story mentions."""
    require(Count, n=n)
    if what not in {**PEOPLE, **THINGS, **BOXES}:
        raise ValueError(f"what={what!r} is in no story")
    rng = Random(seed)
    found: list[Asked] = []
    while len(found) < n:
        plot = make_plot(config, rng)[:-2]  # without its last question and answer
        story = Asked(tuple(plot), what)
        if any(what in sentence.words or what in sentence.words[-1] for sentence in plot):
            found.append(story)
    return found


def two_questions(n: int, seed: int = 0, config: PlotConfig = SMALL) -> list[tuple[Asked, Asked]]:
    """``n`` stories, each asked about two people who are in different rooms: "Where is Mia?" and
    "Where is Tom?". Of the two texts only the name differs. Raises ``ValueError`` for stories of
    fewer than two people or rooms."""
    require(Count, n=n)
    if min(config.people, config.rooms) < 2:
        raise ValueError(f"{config} must have two people and two rooms at least")
    rng = Random(seed)
    found: list[tuple[Asked, Asked]] = []
    while len(found) < n:
        plot = tuple(make_plot(config, rng)[:-2])
        one, other, *_ = (Asked(plot, s.words[0]) for s in plot if s.kind == "is in")
        if one.room != other.room:
            found.append((one, other))
    return found


def counterfactual(story: Asked, rng: Random) -> Asked | None:
    """The story with one room of one sentence exchanged, so that it can happen and another room is
    right; ``None`` if no exchange of one word does that."""
    others = []
    for n, sentence in enumerate(story.plot):
        for room in ROOMS:
            if sentence.words[-1] in ROOMS and room != sentence.words[-1]:
                words = (*sentence.words[:-1], room)
                plot = (*story.plot[:n], Sentence(sentence.kind, words), *story.plot[n + 1 :])
                other = Asked(plot, story.what)
                try:
                    if other.room != story.room and len(other.chain) == len(story.chain):
                        others.append(other)
                except ValueError:
                    pass
    return choose(rng, others) if others else None


@dataclass(frozen=True)
class Questions:
    """What a model reads of N stories, and what is right."""

    idx: Tensor  # (N, T) token ids, padded on the left
    positions: Tensor  # (N, T) -1 for padding
    rooms: Tensor  # (N,) the right room, by its number in ROOMS
    words: Tensor  # (8,) the token of each room

    def said(self, logits: Tensor) -> Tensor:
        """The room (N,) that is likeliest in logits (N, T, V) of the last token, or (N, V)."""
        last = logits[:, -1] if logits.dim() == 3 else logits
        return last[:, self.words].argmax(-1)


def batch(stories: list[Asked], tokenizer: Tokenizer) -> Questions:
    """The stories as a batch: every row ends with the token before its room."""
    padded = padded_batch(
        [tokenizer.start(story.text) for story in stories], pad_token_id=0, side="left"
    )
    assert padded.positions is not None
    names = list(ROOMS)
    words = torch.tensor([tokenizer.encode(f" {room}")[0] for room in names])
    rooms = torch.tensor([names.index(story.room) for story in stories])
    return Questions(padded.idx, padded.positions, rooms, words)
