"""A small world in which it is known where everything is, and stories of it.

A :class:`World` follows the sentences of :mod:`~lm_from_scratch.text.story_grammar`: it knows the
place of everything, answers questions, and refuses what cannot be. So :func:`check` can say of any
story whether it holds together, also of one that a model wrote; and after every sentence there is
a state to look for in a model's activations.

:mod:`~lm_from_scratch.text.plots` makes the stories.

Source of the idea: Weston et al., *Towards AI-Complete Question Answering: A Set of Prerequisite
Toy Tasks*, 2015, arXiv:1502.05698.
"""

from dataclasses import dataclass, field
from typing import Any

from lm_from_scratch.text.story_grammar import (
    BOXES,
    EVENTS,
    FACTS,
    PEOPLE,
    QUESTIONS,
    ROOMS,
    Sentence,
    cut,
    read,
    write,
)


@dataclass
class World:
    """Where everything is: ``place`` maps a person to a room, and a thing to a room, a box or a
    person. It holds one place for each, so nothing is in two."""

    place: dict[str, str] = field(default_factory=dict)
    due: Sentence | None = None  # the answer to the question that was just asked

    def chain(self, what: str) -> list[str]:
        """Where something is, from inside out: ``["box", "Tom", "kitchen"]``."""
        places = []
        while what not in ROOMS:
            what = self.place[what]
            places.append(what)
        return places

    def within(self, place: str) -> tuple[str, ...]:
        """The things directly in a box, in a room or in a person's hands."""
        return tuple(w for w, at in self.place.items() if at == place and w not in PEOPLE)

    def answer(self, question: Sentence) -> Sentence:
        """The right answer. Raises ``ValueError`` for what the story has not mentioned."""
        kind, (what,) = question
        self._must_know(what)
        at, room = self.place[what], self.chain(what)[-1]
        if kind == "where is":
            return Sentence("is in", (what, room))
        if kind == "where":
            if at in BOXES:
                return Sentence("inside there", (what, at, room))
            lies = at in ROOMS
            return (
                Sentence("lies in", (what, at))
                if lies
                else Sentence("held there", (at, what, room))
            )
        if kind == "who has":
            holders = [who for who in self.chain(what) if who in PEOPLE]
            return (
                Sentence("has", (holders[0], (what,))) if holders else Sentence("no one", (what,))
            )
        some, none = ("has", "nothing") if kind == "what has" else ("holds", "is empty")
        inside = self.within(what)
        return Sentence(some, (what, inside)) if inside else Sentence(none, (what,))

    def follow(self, sentence: Sentence) -> None:
        """Bring the world up to date. Raises ``ValueError`` for a sentence that cannot be or is not
        true, and leaves everything in its place."""
        due, self.due = self.due, None
        if due is not None:
            if not same(sentence, due):
                raise ValueError(f"wrong answer: {write([sentence])} Right: {write([due])}")
        elif sentence.kind in QUESTIONS:
            self.due = self.answer(sentence)
        elif sentence.kind in EVENTS:
            self._must_know(*(word for word in sentence.words if word not in ROOMS))
            self._move(sentence)
        elif sentence.kind in FACTS:
            self._learn(sentence)
        else:
            raise ValueError(f"an answer without a question: {write([sentence])}")

    def _must_know(self, *names: str) -> None:
        for name in names:
            if name not in self.place:
                raise ValueError(f"the story has not mentioned {name}")

    def _learn(self, fact: Sentence) -> None:
        """Believe what a fact says of a newcomer. Of all others it must be true."""
        kind, (first, second) = fact
        places = dict.fromkeys(second, first) if kind == "has" else {first: second}
        self._must_know(*(at for at in places.values() if at not in ROOMS))
        if any(self.place.get(what, at) != at for what, at in places.items()):
            raise ValueError(f"not true: {write([fact])}")
        self.place |= places

    def _move(self, event: Sentence) -> None:
        """Change the places as an event says."""
        kind, (who, *words) = event
        place, here = self.place, self.place[who]

        def need(true: bool, why: str) -> None:
            if not true:
                raise ValueError(f"impossible: {write([event])} {why}")

        def at_hand(what: str) -> None:
            need(place[what] in (who, here), f"The {what} is not there.")

        def has(what: str) -> None:
            need(place[what] == who, f"{who} does not have the {what}.")

        match kind, *words:
            case ("go" | "run", room):
                need(here != room, f"{who} is there already.")
                place[who] = room
            case ("join", other):
                need(here != place[other], f"{who} is there already.")
                place[who] = place[other]
            case ("carry", what, room):
                at_hand(what)
                need(here != room, f"{who} is there already.")
                place[what], place[who] = who, room
            case ("take" | "pick up", what):
                need(place[what] == here, f"The {what} does not lie there.")
                place[what] = who
            case ("take out", thing, box):
                at_hand(box)
                need(place[thing] == box, f"The {thing} is not in it.")
                place[thing] = who
            case ("put" | "hide", thing, box):
                has(thing)
                at_hand(box)
                place[thing] = box
            case ("put down", what):
                has(what)
                place[what] = here
            case ("give", what, other):
                has(what)
                need(place[other] == here and other != who, f"{other} is not there.")
                place[what] = other
            case ("empty", box):
                at_hand(box)
                need(box in place.values(), f"The {box} is empty.")
                place |= dict.fromkeys(self.within(box), here)


def same(a: Sentence, b: Sentence) -> bool:
    """Whether two sentences are equal, in whatever order a list is."""

    def unordered(sentence: Sentence) -> list[Any]:
        return [sorted(word) if isinstance(word, tuple) else word for word in sentence.words]

    return a.kind == b.kind and unordered(a) == unordered(b)


@dataclass
class Report:
    """What :func:`check` found, to be added up over stories. ``faults`` says it in words."""

    sentences: int = 0
    readable: int = 0  # of the sentences
    events: int = 0
    possible: int = 0  # of the events
    questions: int = 0
    right: int = 0  # of the answers
    faults: list[str] = field(default_factory=list)

    def __add__(self, other: "Report") -> "Report":
        return Report(**{name: value + vars(other)[name] for name, value in vars(self).items()})


def check(story: str) -> Report:
    """Follow a story and count what cannot be: sentences of no grammar, events that are impossible,
    wrong answers. After a fault the story goes on as if that sentence were not there."""
    report, world = Report(), World()
    for text in cut(story):
        report.sentences += 1
        asked, is_event = world.due is not None, False
        report.questions += asked
        try:
            sentence = read(text)
            report.readable += 1
            is_event = sentence.kind in EVENTS and not asked
            report.events += is_event
            world.follow(sentence)
        except ValueError as error:
            world.due = None
            report.faults.append(str(error))
        else:
            report.possible += is_event
            report.right += asked
    if world.due is not None:
        report.questions += 1
        report.faults.append(f"no answer, which is: {write([world.due])}")
    return report
