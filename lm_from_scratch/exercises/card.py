"""The card of an exercise: what the course says of it, read without running its checks.

An exercise brings torch and a part of the package, which a list of all of them does without: its
plain values are read from the call ``EXERCISE = Exercise(...)`` that ends its ``checks.py``.
"""

import ast
import re
from dataclasses import dataclass, fields
from pathlib import Path

from lm_from_scratch.exercises import catalogue, progress


@dataclass(frozen=True, kw_only=True)
class Card:
    """What the course says of an exercise.

    * ``name``: of the exercise and of its folder in `catalogue/`
    * ``page``: the tutorial that it belongs to, as "2_qwen2/1_rms_norm"
    * ``minutes``: for a student who has read that page
    * ``difficulty``: 1 (a few lines from the page), 2 (an idea to transfer), 3 (several at once)
    * ``hints``: from a nudge to the last question before the solution
    * ``after``: exercises to do before
    * ``draft``: whether it may still be wrong: it can be done, and is no part of the course
    """

    name: str
    page: str
    minutes: int
    difficulty: int
    hints: tuple[str, ...]
    after: tuple[str, ...] = ()
    draft: bool = False

    @property
    def key(self) -> tuple[int, int, str, int, str]:
        """The place in the learning path: chapter, page, difficulty, name."""
        chapter, _, page = self.page.partition("/")
        number = int(chapter.partition("_")[0]) if chapter[:1].isdigit() else 99  # GPU pages last
        lesson = re.match(r"\d+", page)
        return number, int(lesson[0]) if lesson else 0, page, self.difficulty, self.name


def folder(name: str) -> Path:
    """Where an exercise is: `text.py`, `checks.py`, and `part.py` where a model can run it."""
    return Path(catalogue.__path__[0]) / name


def has_part(name: str) -> bool:
    """Whether an answer has a place in a model: `part.py`."""
    return (folder(name) / "part.py").is_file()


def names() -> list[str]:
    """Of all exercises, drafts too."""
    return sorted(path.parent.name for path in folder("").glob("*/checks.py"))


def known(name: str) -> str:
    """``name`` if it is an exercise. Raises ``ValueError``, with the nearest names, if not."""
    if name not in names():
        from difflib import get_close_matches

        near = get_close_matches(name, names(), n=3)
        hint = f"do you mean {' or '.join(near)}?" if near else "list shows all"
        raise ValueError(f"there is no exercise {name!r}; {hint}")
    return name


def card(name: str) -> Card:
    """One card. Raises ``ValueError``, with the nearest names, if there is no such exercise."""
    return _read(known(name))


def _read(name: str) -> Card:
    """The card of an exercise that there is."""
    text = (folder(name) / "checks.py").read_text(encoding="utf-8")
    call = ast.parse(text[text.index("\nEXERCISE = Exercise(") :]).body[0]
    assert isinstance(call, ast.Assign) and isinstance(call.value, ast.Call)
    own = {field.name for field in fields(Card)}
    values = {word.arg: word.value for word in call.value.keywords if word.arg in own}
    return Card(**{str(arg): ast.literal_eval(value) for arg, value in values.items()})


def course() -> tuple[Card, ...]:
    """All exercises but drafts in the order of the learning path; in a chapter, `after` comes
    first."""
    cards = sorted((c for c in map(_read, names()) if not c.draft), key=lambda card: card.key)
    ordered: list[Card] = []
    while cards:
        chapter = [card for card in cards if card.key[0] == cards[0].key[0]]
        left = {card.name for card in chapter}
        first = next((card for card in chapter if not left & set(card.after)), cards[0])
        ordered.append(first)
        cards.remove(first)
    return tuple(ordered)


def waiting() -> tuple[Card, ...]:
    """The drafts."""
    return tuple(c for c in map(_read, names()) if c.draft)


def following() -> Card | None:
    """The first exercise of the path that is not solved."""
    done = progress.load()
    return next((c for c in course() if not done.get(c.name, {}).get("passed")), None)
