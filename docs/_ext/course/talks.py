"""What is said of a lesson in class, and how many minutes that takes: the questions of the page,
then a talk about its pictures, the board, where students stumble, and the lines to keep.

Only what needs a teacher's judgement is written by hand, for each lesson once: what to do at the
board, where students stumble, a false sentence, questions: its *note*, in `docs/classroom/notes`.
"""

import re
import tomllib
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise
from typing import Any

from gallery import pages

NOTES = pages.DOCS / "classroom" / "notes"
#: Words that are said in a minute, a common pace of talks.
WORDS_A_MINUTE = 150
#: Minutes for a class to look at a picture, to choose an answer (alone, then with a neighbour), and
#: to fill a board.
LOOK, CHOOSE, BOARD = 1, 2, 5
PREDICT = "**Predict first.**"
LETTERS = "abcdefgh"


@dataclass(frozen=True)
class Note:
    """What is written by hand for a lesson."""

    answers: list[str]  # how the right choice of each question begins; "" if none is right
    board: str
    stumble: str
    false: tuple[str, str]  # the sentence, and why
    ask: list[list[str]] = field(default_factory=list)  # questions and answers
    say: list[list[str]] = field(default_factory=list)  # pictures, and what to say at each


@cache
def notes() -> dict[str, Any]:
    """All that is written by hand: of a lesson by its name, of exercises by "CHAPTER/exercises"."""
    return {
        f"{path.stem}/{name}": table
        for path in NOTES.glob("*.toml")
        for name, table in tomllib.loads(path.read_text(encoding="utf-8")).items()
    }


def note(name: str) -> Note:
    table = notes()[name]
    return Note(**table | {"false": tuple(table["false"])})


def markdown(text: str, page: str = "") -> str:
    """A text of a page, or of a document of `docs`, in MyST. Titles of links have no code."""
    text = pages.with_documents(page, text, ":doc:`{} <{}>`")
    text = re.sub(r":doc:`([^`<]+?)\s*<([^>`]+)>`", r"{doc}`\1 <\2>`", text)
    text = re.sub(r"``([^`]+)``", r"`\1`", text)
    text = re.sub(r":math:`([^`]+)`", r"$\1$", text)
    text = re.sub(r"(?<!\})`([^`<]+?)\s*<(https?://[^>`]+)>`_+", r"[\1](\2)", text)
    return " ".join(text.split())


# -- what the pages ask, and what is kept of them -------------------------------------------------


@dataclass(frozen=True)
class Question:
    """A question of a page before its output, its choices, and what the page says after it."""

    text: str
    choices: list[str]
    right: str  # its letter
    answer: str


@cache
def questions(name: str) -> list[Question]:
    """The questions "Predict first" of a page, in Markdown."""
    texts = [block.content for block in pages.blocks(pages.source(name)) if block.type == "text"]
    pairs = [(text, after) for text, after in pairwise([*texts, ""]) if PREDICT in text]
    asked = []
    for (text, after), right in zip(pairs, note(name).answers, strict=True):
        question, *items = re.split(r"^\* +", text.partition(PREDICT)[2], flags=re.M)
        choices = [markdown(first_paragraph(item), name) for item in items]
        letter = letter_of(right, choices) if right else ""
        answer = markdown(first_paragraph(after), name)
        asked.append(Question(markdown(question, name), choices, letter, answer))
    return asked


def letter_of(right: str, choices: list[str]) -> str:
    """The letter of the choice that is, or begins with, the right answer of a note."""
    same = [choice for choice in choices if choice == right]
    (choice,) = same or [choice for choice in choices if choice.startswith(right)]
    return LETTERS[choices.index(choice)]


def first_paragraph(text: str) -> str:
    return text.strip().split("\n\n")[0]


def items(text: str, mark: str) -> list[str]:
    """The items of a list, whose first lines begin with ``mark``."""
    return [first_paragraph(part) for part in re.split(rf"^{mark} +", text, flags=re.M)[1:]]


def to_keep(name: str) -> list[str]:
    """The three lines to keep."""
    return [markdown(item, name) for item in items(pages.text_of(name, "Summary"), r"\*")]


# -- minutes -------------------------------------------------------------------------------------


def minutes_to_say(*texts: str) -> int:
    """Minutes to say texts aloud, at least one. Where a link leads is not said."""
    aloud = [re.sub(r"\{doc\}`([^`]+?) <[^`>]+>`", r"\1", text) for text in texts]
    return max(1, round(sum(map(pages.words, aloud)) / WORDS_A_MINUTE))


def talk_minutes(name: str) -> int:
    """Minutes of a talk: its pictures, the board, where students stumble, the lines to keep."""
    pictures = sum(picture_minutes(words) for _, words in note(name).say)
    return BOARD + pictures + minutes_to_say(note(name).stumble, *to_keep(name))


def picture_minutes(words: str) -> int:
    return LOOK + minutes_to_say(words)


def question_minutes(name: str) -> int:
    """Minutes of the questions before a talk: read aloud, chosen, answered."""
    asked = questions(name)
    texts = (text for one in asked for text in (one.text, *one.choices, one.answer))
    return CHOOSE * len(asked) + minutes_to_say(*texts)


def minutes(name: str) -> int:
    """Minutes of class that a lesson takes: its questions, then the talk."""
    return question_minutes(name) + talk_minutes(name)
