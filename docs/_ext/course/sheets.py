"""A sheet for a week of a plan: minutes, talk, votes, questions, a quiz, model answers.

What is said of a lesson is in `talks`. All else comes from the pages, the exercises, the bug museum
and the page of questions. A *hunt* is an exercise that hands out code with mistakes of the bug
museum, which students are to find.
"""

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import zip_longest
from zlib import crc32

from gallery import exercises, pages
from museum import cards
from sources.templates import PAGES, render

from course import plans
from course.talks import (
    BOARD,
    CHOOSE,
    LETTERS,
    LOOK,
    WORDS_A_MINUTE,
    items,
    markdown,
    minutes,
    minutes_to_say,
    note,
    notes,
    picture_minutes,
    questions,
    to_keep,
)
from lm_from_scratch.exercises import source
from lm_from_scratch.exercises.exercise import Exercise, Wrong, exercise
from lm_from_scratch.exercises.report import missing
from lm_from_scratch.exercises.run import tried, wanted

os.environ.setdefault("TRITON_INTERPRET", "1")  # before Triton is imported: kernels are voted on

#: Minutes for what begins a week, and for a meeting.
OPEN, MEETING = 10, 90
#: At most so many votes for an exercise, and for a week; and questions that may come in a week.
VOTES, MAY_COME = 3, 6
#: Sentences of a long answer that a sheet holds.
SHORT = 2
#: Numbers in words, for titles.
WORDS = {6: "Six", 12: "Twelve"}
QUIZ = "Which sentence is false?"


def explanation(one: Exercise) -> str:
    """A model answer to "why": written by hand, or, for a bug hunt, taken from the bug museum."""
    by_hand = notes()[f"{one.page.partition('/')[0]}/exercises"]
    mistakes = [cards.numbers()[number] for number in cards.NUMBER.findall(one.hunt)]
    texts = (f"{card.wrong} A user saw this: {card.saw}" for card in mistakes)
    return str(by_hand.get(one.name) or markdown(" ".join(texts), one.page))


def steps(name: str) -> list[str]:
    """The headings of a lesson, without those at its end."""
    titles = [s.title for s in pages.sections(name) if s.mark == "-"]
    return [markdown(t, name) for t in titles if t not in ("Exercises", "Summary")]


@dataclass(frozen=True)
class Quiz:
    """Sentences of which at least one is false, and which one and why."""

    page: str
    sentences: list[str]
    answer: str


def own_quiz(name: str) -> Quiz:
    """The lines to keep of a lesson, and among them a false sentence."""
    sentences = to_keep(name)
    false, why = note(name).false
    place = crc32(name.encode()) % (len(sentences) + 1)
    sentences.insert(place, false)
    return Quiz(name, sentences, f"Sentence {place + 1}. {why}")


def deeper_quizzes(name: str) -> list[Quiz]:
    """Those of the in-depth pages of a lesson. What follows the sentences there is the answer, but
    for a paragraph that only leads to the code."""
    quizzes = []
    for deeper in pages.in_depth(name):
        if text := pages.text_of(deeper, QUIZ):
            paragraphs = [part for part in text.split("\n\n") if not re.match(r"\d+\. ", part)]
            answer = [part for part in paragraphs if re.search(r"false|^The \w+:|true", part)]
            sentences = [markdown(item, deeper) for item in items(text, r"\d+\.")]
            quizzes.append(Quiz(deeper, sentences, markdown(" ".join(answer), deeper)))
    return quizzes


# -- what people ask -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Asked:
    """A question that a class may ask, its answer, and the lessons that it is about."""

    text: str
    answer: str
    lessons: set[str]


def may_come(lessons: list[str]) -> list[Asked]:
    """Those of the notes, then those of the page of questions, of each lesson in turn."""
    noted = [Asked(*pair, {name}) for name in lessons for pair in note(name).ask]
    turns = [[one for one in [*noted, *asked()] if name in one.lessons] for name in lessons]
    found = [one for turn in zip_longest(*turns) for one in turn if one]
    return list({one.text: one for one in found}.values())[:MAY_COME]


@cache
def asked() -> list[Asked]:
    """The questions of `questions.rst`."""
    text = (pages.DOCS / "questions.rst").read_text(encoding="utf-8")
    parts = re.split(r"^(\S.*)\n~+$", text, flags=re.M)[1:]
    questions = []
    for title, body in zip(parts[::2], parts[1::2], strict=True):
        body = re.sub(r"^\.\. words:.*\n(?: +.*\n)*", "", body, flags=re.M).strip()
        answer, _, rest = body.partition("\n\n")
        answer = "".join(re.findall(r".+?[.?!](?=\s|$)", " ".join(answer.split()))[:SHORT])
        places = re.findall(r"</(?:auto_tutorials/)?([\w/]+)>`", rest)
        lessons = {pages.lesson(name) for place in places if (name := pages.page_of(place))}
        questions.append(Asked(markdown(title), markdown(answer), lessons))
    return questions


# -- votes ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Vote:
    """A wrong answer of the catalogue: which of the checks rejects it?"""

    exercise: Exercise
    number: int  # of its file, NAME_1.py
    wrong: Wrong
    accepted: int  # how many checks accept it
    choices: list[str]  # names of checks, one of which rejects it

    @property
    def right(self) -> str:
        return LETTERS[self.choices.index(self.wrong.case)]

    @property
    def hint(self) -> str:
        return next(case.hint for case in self.exercise.cases if case.name == self.wrong.case)


@cache
def rejected(name: str) -> dict[str, list[str]]:
    """Of the first wrong answer to each check, by label, which checks reject it, with the numbers
    of seed 0. Where a kernel cannot run, these are the checks that are named for it."""
    one = exercise(name)
    first: dict[str, Wrong] = {}
    for wrong in one.wrong:
        if isinstance(wrong.answer, Mapping):
            first.setdefault(wrong.case, wrong)
    changes = first.values()
    if missing(one):
        return {wrong.label: [wrong.case] for wrong in changes}
    wants = [wanted(one, number, 0) for number in range(len(one.cases))]
    answers = {wrong.label: source.answer(one, wrong.answer) for wrong in changes}
    return {
        label: [
            case.name
            for number, case in enumerate(one.cases)
            if tried(one, number, answer, wants[number], 0).wrong
        ]
        for label, answer in answers.items()
    }


def votes(one: Exercise) -> list[Vote]:
    """The answers to argue about: those that most checks accept, each seen by another check."""
    by = rejected(one.name)
    changes = [wrong for wrong in one.wrong if wrong.label in by]
    names = [case.name for case in one.cases]
    chosen = []
    least = sorted(changes, key=lambda wrong: len(by[wrong.label]))
    for number, wrong in enumerate(least[:VOTES], 1):
        accepts = [name for name in names if name not in by[wrong.label]]
        begin = crc32(wrong.label.encode()) % max(len(accepts), 1)
        others = [*accepts[begin:], *accepts[:begin]][:2]
        choices = sorted([wrong.case, *others], key=names.index)
        chosen.append(Vote(one, number, wrong, len(accepts), choices))
    return chosen


def votes_of(week: plans.Week) -> list[Vote]:
    """Three for a week: one of each exercise done in class, then a second one of each."""
    order = week.in_class()
    turns = sorted((vote for one in order for vote in votes(one)), key=lambda vote: vote.number)
    return sorted(turns[:VOTES], key=lambda vote: order.index(vote.exercise))


def wrong_file(vote: Vote) -> str:
    """The wrong answer as a script that a teacher can check before the class."""
    own = source.solution(vote.exercise.name, with_given=False)
    changed = own
    for old, new in vote.wrong.answer.items():
        changed = changed.replace(old, new)
    return source.solution(vote.exercise.name).replace(own, changed)


# -- minutes -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Item:
    minutes: int
    text: str


def vote_minutes(turns: list[Vote]) -> int:
    """Minutes of votes: what is wrong, the checks to choose from, and what the right one says."""
    texts = (text for one in turns for text in (one.wrong.label, *one.choices, one.hint))
    return CHOOSE * len(turns) + minutes_to_say(*texts)


def agenda(weeks: int, week: int) -> Iterator[Item]:
    """What happens in class, in order: each lesson, then the exercises that belong to it."""
    plan = plans.weeks(weeks)[week - 1]
    turns = votes_of(plan)
    first = "Everyone runs `doctor`; neighbours help where it does not say *all well*."
    yield Item(OPEN, first if week == 1 else f"Quiz on week {week - 1}; talk about the answers.")
    for name in [None, *plan.pages]:  # an exercise of an earlier week comes first
        if name:
            title = pages.sections(name)[0].plain
            text = f"{title}: {len(questions(name))} questions first, then the talk."
            yield Item(minutes(name), text)
        for one in plan.in_class():
            if name != (one.page if one.page in plan.pages else None):
                continue
            how = "in pairs, one reads aloud" if one.hunt else "each alone, then with a neighbour"
            yield Item(one.minutes, f"Exercise `{one.name}`, {how}.")
            if own := [vote for vote in turns if vote.exercise == one]:
                many = "s" * (len(own) > 1)
                yield Item(vote_minutes(own), f"Vote on {len(own)} answer{many} to it.")
    lines_to_keep = [line for name in plan.pages for line in to_keep(name)]
    yield Item(minutes_to_say(*lines_to_keep), "The lines to keep, and what to do at home.")


def meetings(weeks: int, week: int) -> list[list[tuple[str, Item]]]:
    """The agenda cut into one meeting or two, about equally long, each item with its time from the
    beginning of its meeting. A vote belongs to the exercise before it."""
    items = [*agenda(weeks, week)]
    if length(items) <= MEETING:
        return [timed(items)]
    cuts = [at for at in range(1, len(items)) if not items[at].text.startswith("Vote")]
    cut = min(cuts, key=lambda at: max(length(items[:at]), length(items[at:])))
    return [timed(items[:cut]), timed(items[cut:])]


def length(items: list[Item]) -> int:
    return sum(item.minutes for item in items)


def timed(items: list[Item]) -> list[tuple[str, Item]]:
    clocks = [length(items[:at]) for at in range(len(items))]
    return [(f"{at // 60}:{at % 60:02d}", item) for at, item in zip(clocks, items, strict=True)]


# -- the sheet -----------------------------------------------------------------------------------

PAGES.filters |= exercises.FILTERS | {
    "page_link": lambda name: f"{{doc}}`{pages.sections(name)[0].plain} <{pages.document(name)}>`",
    "steps": steps,
    "questions": questions,
    "to_keep": to_keep,
    "note": note,
    "picture_minutes": picture_minutes,
    "explanation": explanation,
    "votes": votes,
}


def place(weeks: int, week: int) -> str:
    """The document of a sheet: of a plan of so many ``weeks``, the ``week``, counted from 1."""
    return f"classroom/weeks_{weeks}/week_{week:02d}"


def sheet(weeks: int, week: int) -> str:
    plan = plans.weeks(weeks)[week - 1]
    return render(
        "teaching/sheet.md",
        weeks=weeks,
        words=WORDS[weeks],
        week=week,
        plan=plan,
        meetings=meetings(weeks, week),
        words_a_minute=WORDS_A_MINUTE,
        look=LOOK,
        board=BOARD,
        choose=CHOOSE,
        votes=votes_of(plan),
        may_come=may_come(plan.pages),
        own=[own_quiz(name) for name in plan.pages],
        deeper=[quiz for name in plan.pages for quiz in deeper_quizzes(name)],
        letters=LETTERS,
        lines=lines,
    )


def lines(one: Exercise) -> int:
    """Lines of code of the solution."""
    code = source.solution(one.name, with_given=False)
    return len(re.findall(r"^\s*[^\s#]", code, re.M))
