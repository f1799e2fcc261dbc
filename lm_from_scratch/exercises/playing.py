"""Your code runs the model: solved exercises are put into a shipped model, and it writes.

What it writes is shown beside what it writes with the package's own functions, and beside what it
writes with a planted wrong answer. A loss, an optimizer or a schedule is shown by a short run.
"""

import textwrap
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from lm_from_scratch.exercises import side_by_side
from lm_from_scratch.exercises.card import has_part
from lm_from_scratch.exercises.exercise import Exercise, exercise, exercises
from lm_from_scratch.exercises.loops import LOOPS, PROMPTS
from lm_from_scratch.exercises.parts import Part, part, trained, untrained
from lm_from_scratch.exercises.source import answer

LENGTHS = {"write": 40, "batch": 20, "search": 12, "draft": 30, "learn": 40}
CLOSE = 0.01  # rounding grows from step to step
WRONGS = 12  # so many planted wrong answers are tried, for one that shows

Functions = Mapping[str, Callable[..., Any]]


@dataclass
class Shown:
    """What a machine did, and the error that ended it.

    * ``values``: token ids, or losses, in the order in which they came
    * ``texts``: the same by the number of the text, in pieces: what came at once
    """

    values: list[float] = field(default_factory=list)
    error: str = ""
    texts: dict[int, list[list[float]]] = field(default_factory=dict)

    def add(self, text: int, values: Collection[float]) -> None:
        """What comes next, and to which text it belongs."""
        self.values += values
        self.texts.setdefault(text, []).append([*values])

    def same(self, other: "Shown") -> int:
        """How many of the first values are equal: tokens, or losses to two decimals."""
        pairs = enumerate(zip(self.values, other.values, strict=False))
        shorter = min(len(self.values), len(other.values))
        return next((n for n, (a, b) in pairs if not abs(a - b) <= CLOSE), shorter)


@dataclass(frozen=True)
class Agreement:
    """What a machine did, beside what it does with the package's own functions.

    * ``same``: how many of the first tokens or losses are the same, ``of`` how many
    * ``error``: what ended it
    """

    same: int
    of: int
    error: str = ""

    @property
    def complete(self) -> bool:
        """Whether it did the same to the end."""
        return not self.error and self.same == self.of


def agreement(own: Shown, right: Shown) -> Agreement:
    """How far two machines did the same. One that goes on after the other's end differs there."""
    return Agreement(own.same(right), max(len(own.values), len(right.values)), own.error)


def play(name: str, function: Callable[..., Any]) -> bool:
    """Let a model write, or learn, with your answer to an exercise, and print what comes of it.

    * ``name``: of the exercise
    * ``function``: what you wrote

    Returns whether the model does the same with it as with the package's own function. Where an
    answer has no place in a model, its result is shown beside the right one.
    """
    wanted = exercise(name)
    if not has_part(name):
        held, of = side_by_side.show(wanted, function)
        return held == of
    place = place_of(name)
    right = with_references(place.loop, (name,))  # before any code of yours
    own = perform({name: function}, place.loop)
    print(f"{name}: {place.place}, in a model that {LOOPS[place.loop].does}")
    if own.error.startswith(NotImplementedError.__name__):
        print("not written yet")
        return False
    show("with the package's own function", right, place.loop)
    show(f"with yours: {account(own, right)}", own, place.loop)
    if mistake := one_that_shows(wanted, right, place.loop):
        label, shown = mistake
        show(f"with a wrong one ({label}): {account(shown, right)}", shown, place.loop)
    return agreement(own, right).complete


def play_together(functions: Functions, missing: Mapping[str, str]) -> bool:
    """Let one model write and learn with all these answers at once, and print what comes of it.

    * ``functions``: by exercise
    * ``missing``: of exercises that have a place and no answer: why, in words

    Returns whether it does the same as with the package's own functions.
    """
    parts = {e.name: piece for e in exercises() if (piece := part(e.name))}
    print(picture(parts, {name: "yours" for name in functions} | dict(missing)))
    everything = True
    for title, (own, right, loop) in together(functions).items():
        show(f"it {title}: {account(own, right)}", own, loop)
        everything &= agreement(own, right).complete
    return everything


def together(functions: Functions) -> dict[str, tuple[Shown, Shown, str]]:
    """What a machine with all these functions does in each stage, beside what it does with the
    package's own, and the loop's name."""
    planned = stages(functions)
    rights = [with_references(loop, tuple(names)) for _, loop, names in planned]  # before any code
    return {
        title: (perform({name: functions[name] for name in names}, loop), right, loop)
        for (title, loop, names), right in zip(planned, rights, strict=True)
    }


def alone(name: str, function: Callable[..., Any]) -> Agreement:
    """How far a machine with this one answer does the same as with the package's own."""
    loop = place_of(name).loop
    right = with_references(loop, (name,))
    return agreement(perform({name: function}, loop), right)


def with_references(loop: str, names: tuple[str, ...]) -> Shown:
    """What a machine with the package's own functions in these places does. It is kept: a class has
    the same for all."""
    key = loop, names, LENGTHS[loop]
    if key not in _KEPT:
        _KEPT[key] = perform({name: exercise(name).reference for name in names}, loop)
    return _KEPT[key]


_KEPT: dict[tuple[str, tuple[str, ...], int], Shown] = {}


def stages(names: Collection[str]) -> list[tuple[str, str, list[str]]]:
    """How these answers run together: what the model does, in which loop, and with which of
    them. The search and its like are run if the answer that they show is there. Parts that round
    have a stage of their own: the others must not change a token."""
    loops = []
    for loop, what in LOOPS.items():
        own = [name for name in names if place_of(name).joins(loop)]
        exact = [name for name in own if not place_of(name).rounds]
        shown_here = loop in ("write", "learn") or any(place_of(n).loop == loop for n in own)
        if exact and shown_here:
            loops.append((what.does, loop, exact))
        if own != exact:
            loops.append((f"{what.does}, rounded", loop, own))
    return loops


def place_of(name: str) -> Part:
    """The part of an exercise. Raises ``ValueError``, with those there are, if it has none."""
    place = part(name)
    if place is None:
        names = ", ".join(e.name for e in exercises() if has_part(e.name))
        raise ValueError(f"{name} has no place in a model; these have one: {names}")
    return place


def perform(functions: Functions, loop: str = "write") -> Shown:
    """What a machine with these functions writes, or how its loss falls. What a function raises
    ends it, and is said."""
    machine, shown = untrained() if loop == "learn" else trained(), Shown()
    try:
        for name in (e.name for e in exercises() if e.name in functions):
            place_of(name).put(machine, functions[name])
        for text, values in LOOPS[loop].run(machine, LENGTHS[loop]):
            shown.add(text, values)
    except NotImplementedError:
        shown.error = "NotImplementedError: not written yet"
    except Exception as error:
        lines = str(error).splitlines() or [""]
        shown.error = f"{type(error).__name__}: {lines[0][:200]}"
    return shown


def one_that_shows(wanted: Exercise, right: Shown, loop: str) -> tuple[str, Shown] | None:
    """Of the first planted wrong answers, the one whose text or run is soonest another: what it is,
    and what the machine does with it. Others are wrong where no text shows it, as in float16."""
    mistakes: dict[str, Shown] = {}
    for wrong in wanted.wrong[:WRONGS]:
        shown = perform({wanted.name: answer(wanted, wrong.answer)}, loop)
        if not shown.error and not agreement(shown, right).complete:
            mistakes[wrong.label] = shown
        if len(mistakes) == 3:
            break
    return min(mistakes.items(), key=lambda item: item[1].same(right), default=None)


def account(shown: Shown, right: Shown) -> str:
    """How much is the same, in words."""
    result = agreement(shown, right)
    if shown.error:
        return f"stopped after {len(shown.values)} of {len(right.values)} by {shown.error}"
    if result.complete:
        return f"all {result.of} are the same"
    if not result.same:
        return f"the first of {result.of} differs"
    return f"the first {result.same} of {result.of} are the same"


def show(title: str, shown: Shown, loop: str) -> None:
    """Print a title and what a machine did: losses, or a line for each text. A bar stands
    between sentences that were found, and where a pass that may give several tokens ended."""
    print(f"\n{title}")
    if loop == "learn":
        every = [1, *range(10, len(shown.values) + 1, 10)] if shown.values else []
        lines = ["loss  " + "  ".join(f"{shown.values[step - 1]:.2f}" for step in every)]
    else:
        tokenizer, bar = trained().tokenizer, "|" if loop in ("search", "draft") else ""
        lines = []
        for text, pieces in shown.texts.items() or {0: []}.items():
            words = bar.join(tokenizer.decode([int(token) for token in p]) for p in pieces)
            if not bar:  # characters of several bytes: their tokens must be decoded together
                words = tokenizer.decode([int(token) for piece in pieces for token in piece])
            words = words.replace("\ufffd", "·")  # half a character
            lines.append(f"{PROMPTS[text]} ... {' '.join(words.split())}")
    print("\n".join(textwrap.indent(textwrap.fill(one, 88), "    ") for one in lines))


def picture(parts: Mapping[str, Part], states: Mapping[str, str]) -> str:
    """The model, and of which of its parts there is an answer."""

    def line(name: str) -> str:
        mark = "■" if states.get(name) == "yours" else "□"
        return f"{mark} {parts[name].place:<36} {name:<16} {states.get(name, '-')}"

    titles = {"write": "┌─┴─ the model that writes", "learn": "├─ and learns"}
    other = "├─ and writes in other ways"
    lines: dict[str, list[str]] = {titles["write"]: [], other: [], titles["learn"]: []}
    for name, place in parts.items():
        lines[titles.get(place.loop, other)].append(line(name))
    width = max(len(one) for block in lines.values() for one in block) + 1
    drawn = ["tokens"]
    for title, block in lines.items():
        drawn.append(f"{title} ".ljust(width + 2, "─") + ("┐" if len(drawn) == 1 else "┤"))
        drawn += [f"│ {one:<{width}}│" for one in block]
    return "\n".join([*drawn, f"└─┬{'─' * (width - 1)}┘", "the next token"])
