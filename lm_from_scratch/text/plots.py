"""Plots of small stories: who and what is where, what happens, and questions in between.

:func:`make_plot` draws one that can happen in a :class:`~lm_from_scratch.text.worlds.World`;
:func:`stories` is the corpus ``worlds``, every plot in English and in Chinese.

A seed gives the same stories in every version of Python: only ``Random.random`` is called, whose
numbers are promised to stay.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Annotated, TypeVar

from lm_from_scratch.limits import Count, Limit, Share, Whole, check, require
from lm_from_scratch.text.document import Document
from lm_from_scratch.text.story_grammar import (
    BOXES,
    EVENTS,
    LANGUAGES,
    PEOPLE,
    QUESTIONS,
    ROOMS,
    THINGS,
    Sentence,
    write,
)
from lm_from_scratch.text.worlds import World

T = TypeVar("T")

#: How often each event and each question is chosen, relative to the others.
EVENT_WEIGHTS = (3, 2, 1, 3, 3, 2, 2, 3, 2, 2, 3, 1)
QUESTION_WEIGHTS = (5, 1.5, 1.5, 1, 1)


def _up_to(names: dict[str, str]) -> Limit:
    return Limit(f"must be at most {len(names)}", lambda n: n <= len(names))


@dataclass(frozen=True, kw_only=True)
class PlotConfig:
    """How much there is in a story."""

    people: Annotated[Count, _up_to(PEOPLE)] = 3
    rooms: Annotated[Count, _up_to(ROOMS)] = 3
    boxes: Annotated[Count, _up_to(BOXES)] = 2
    things: Annotated[Count, _up_to(THINGS)] = 3
    events: Count = 7
    ask: Share = 0.5  # how often another question follows; one always follows the last event

    def __post_init__(self) -> None:
        check(self)


def make_plot(config: PlotConfig, rng: Random) -> list[Sentence]:
    """A plot that can happen."""
    rooms = _several(rng, ROOMS, config.rooms)
    people = _several(rng, PEOPLE, config.people)
    boxes = _several(rng, BOXES, config.boxes)
    things = _several(rng, THINGS, config.things)
    world, plot = World(), []

    def add(sentence: Sentence) -> None:
        world.follow(sentence)
        plot.append(sentence)

    for who in people:
        add(Sentence("is in", (who, choose(rng, rooms))))
    for what in boxes + things:
        kind = choose(rng, ("lies in", "has") if what in BOXES else ("lies in", "inside", "has"))
        if kind == "has":
            add(Sentence("has", (choose(rng, people), (what,))))
        else:
            add(Sentence(kind, (what, choose(rng, rooms if kind == "lies in" else boxes))))
    about = {"where is": people, "what has": people, "what is in": boxes}
    for number in range(config.events):
        add(next_event(world, rooms, rng))
        asked: set[Sentence] = set()
        while rng.random() < config.ask or (number == config.events - 1 and not asked):
            kind = choose(rng, list(QUESTIONS), QUESTION_WEIGHTS)
            question = Sentence(kind, (choose(rng, about.get(kind, boxes + things)),))
            if question in asked:
                break
            asked.add(question)
            add(question)
            assert world.due is not None
            add(world.due)
    return plot


def next_event(world: World, rooms: Sequence[str], rng: Random) -> Sentence:
    """An event that can happen now. Its kind is drawn first: what can be done in many ways is then
    no more frequent."""
    people = [who for who in world.place if who in PEOPLE]
    while True:
        kind = choose(rng, list(EVENTS), EVENT_WEIGHTS)
        if can := [(who, *words) for who in people for words in ways(world, kind, who, rooms)]:
            return Sentence(kind, choose(rng, can))


def ways(world: World, kind: str, who: str, rooms: Sequence[str]) -> list[tuple[str, ...]]:
    """What somebody can do now: the words after the name in every possible event of a kind."""
    place, here = world.place, world.place[who]
    elsewhere: list[tuple[str, ...]] = [(room,) for room in rooms if room != here]
    others = [other for other in place if other in PEOPLE and other != who]
    mine, lying = world.within(who), world.within(here)
    near = [what for what in mine + lying if what in BOXES]
    match kind:
        case "go" | "run":
            return elsewhere
        case "join":
            return [(other,) for other in others if place[other] != here]
        case "carry":
            return [(what, *room) for what in mine + lying for room in elsewhere]
        case "take" | "pick up":
            return [(what,) for what in lying]
        case "take out":
            return [(what, box) for box in near for what in world.within(box)]
        case "put" | "hide":
            return [(what, box) for what in mine if what in THINGS for box in near]
        case "put down":
            return [(what,) for what in mine]
        case "give":
            return [(what, o) for what in mine for o in others if place[o] == here]
        case _:  # empty
            return [(box,) for box in near if world.within(box)]


def choose(rng: Random, items: Sequence[T], weights: Sequence[float] = ()) -> T:
    """One of the items."""
    if not weights:
        return items[int(rng.random() * len(items))]
    x = rng.random() * sum(weights)
    for item, weight in zip(items, weights, strict=True):
        x -= weight
        if x < 0:
            return item
    return items[-1]


def _several(rng: Random, names: dict[str, str], n: int) -> list[str]:
    """``n`` different names in random order."""
    left = list(names)
    return [left.pop(int(rng.random() * len(left))) for _ in range(n)]


def stories(n_plots: int = 32_000, seed: int = 0) -> list[Document]:
    """The corpus ``worlds``: every plot in both languages. They are one group, so that both are on
    one side of the split."""
    require(Count, n_plots=n_plots)
    require(Whole, seed=seed)
    documents = []
    for number in range(n_plots):
        rng = Random(seed * 1_000_003 + number)
        plot = make_plot(config_of_corpus(rng), rng)
        for language in LANGUAGES:
            text = write(plot, language)
            documents.append(Document(f"{language}/{number}", f"worlds/{number}", text))
    return documents


def config_of_corpus(rng: Random) -> PlotConfig:
    """How much there is in a story of the corpus. A third are tiny: from those a model learns to
    look back first, because there is little to look at. Half are full of questions, which say more
    about where everything is than what happens next does."""
    level = choose(rng, (1, 2, 3))
    return PlotConfig(
        people=choose(rng, range(1, level + 2)),
        rooms=choose(rng, range(2, level + 2)),
        boxes=choose(rng, (1, 2) if level > 1 else (1,)),
        things=choose(rng, range(1, level + 2)),
        events=choose(rng, range(1, 2 * level + 2)),
        ask=choose(rng, (0.2, 0.6)),
    )
