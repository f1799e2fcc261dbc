"""What a teacher reads: a sheet for each week of a plan has all its parts, and no solution."""

from __future__ import annotations

import re
from functools import cache

import pytest
from course import plans, sheets, talks
from exercise_leaks import secrets
from gallery import exercises, pages
from output import generated

from lm_from_scratch.exercises import source
from lm_from_scratch.exercises.exercise import Exercise
from lm_from_scratch.exercises.report import examine

# Each sheet runs the wrong answers that a class votes on; `make docs` makes all of them.
pytestmark = pytest.mark.slow


@cache
def texts() -> dict[str, str]:
    return generated.for_teachers() | generated.for_all_pages()


WEEKS = [(number, week) for number in plans.PLANS for week in range(1, number + 1)]
each_week = pytest.mark.parametrize(("number", "week"), WEEKS)


def test_no_line_of_a_solution() -> None:
    """The site shows these pages to students as well."""
    for place, text in texts().items():
        for one in exercises.written():
            found = [line for line in secrets(one.name) if line in text]
            assert all(line in "\n".join(one.hints) for line in found), place


# -- the sheets ------------------------------------------------------------------------------


@each_week
def test_a_sheet_has_all_parts(number: int, week: int) -> None:
    text, found = texts()[f"{sheets.place(number, week)}.md"], plans.weeks(number)[week - 1]
    parts = ["Minutes", "Talk", "Three wrong answers to vote on", "Questions that may come",
             "Quiz", "Model answers"]  # fmt: skip
    assert re.findall(r"^## (.*)$", text, re.M) == parts
    assert text.count("**Vote ") == sheets.VOTES
    assert text.count("* **At the board:**") == len(found.pages)
    asked = sum(len(talks.questions(name)) for name in found.pages)
    assert len(re.findall(r"^\*\*Question \d+\.\*\*", text, re.M)) == asked > 0
    assert len(sheets.may_come(found.pages)) <= sheets.MAY_COME
    assert week > 1 or all(talks.note(name).say for name in found.pages)
    for one in found.exercises:
        assert f"### {exercises.link(one)}" in text
    for answer in re.findall(r"^\*Answer:\* *(.*)$", text, re.M):
        assert len(answer) > 20, answer


@each_week
def test_meetings_are_short_and_hold_everything(number: int, week: int) -> None:
    cut = sheets.meetings(number, week)
    assert all(sum(item.minutes for _, item in meeting) <= sheets.MEETING for meeting in cut)
    text = " ".join(item.text for meeting in cut for _, item in meeting)
    found = plans.weeks(number)[week - 1]
    assert all(f"`{one.name}`" in text for one in found.in_class())
    assert len(re.findall(r"questions? first", text)) == len(found.pages)
    assert sum(map(int, re.findall(r"Vote on (\d)", text))) == sheets.VOTES


def test_each_lesson_of_a_plan_has_a_note_and_each_note_a_lesson() -> None:
    """Of a lesson that is in no plan, the right choices alone are known."""
    taught = {name for number in plans.PLANS for week in plans.weeks(number) for name in week.pages}
    noted = {name for name, note in talks.notes().items() if "board" in note}
    for name in (name for name in talks.notes() if name.endswith("/exercises")):
        chapter = name.removesuffix("exercises")
        about = {one.name for one in exercises.written() if one.page.startswith(chapter)}
        assert talks.notes()[name].keys() <= about, name
    assert noted == taught


NOTED = [name for name in pages.lessons() if "board" in talks.notes().get(name, {})]


@pytest.mark.parametrize("name", NOTED)
def test_questions_and_quiz_of_a_lesson(name: str) -> None:
    for question in talks.questions(name):
        assert question.text and len(question.choices) > 1 and question.answer
    quiz = sheets.own_quiz(name)
    assert len(quiz.sentences) == len(talks.to_keep(name)) + 1
    number = int(re.match(r"Sentence (\d)\. ", quiz.answer)[1])  # type: ignore[index]
    assert quiz.sentences[number - 1] == talks.note(name).false[0]


def test_the_answers_to_quizzes_of_in_depth_pages() -> None:
    """Each says which sentence is false."""
    for name in pages.lessons():
        for quiz in sheets.deeper_quizzes(name):
            assert len(quiz.sentences) >= 3
            assert re.search(r"false|true|^The \w+:", quiz.answer), quiz


@pytest.mark.parametrize("one", exercises.written(), ids=lambda one: one.name)
def test_votes(one: Exercise) -> None:
    """Each wrong answer is a script, and of the checks to choose from one rejects it."""
    found = sheets.votes(one)
    assert found and sheets.explanation(one)
    for vote in found:
        assert vote.wrong.case in vote.choices and len({*vote.choices}) == len(vote.choices)
        assert vote.choices[talks.LETTERS.index(vote.right)] == vote.wrong.case
        assert sheets.wrong_file(vote) != source.solution(one.name)


@pytest.mark.parametrize("name", ["rms_norm", "hunt_padded_targets"])
def test_a_wrong_answer_is_rejected_by_its_check(name: str) -> None:
    one = next(one for one in exercises.written() if one.name == name)
    for vote in sheets.votes(one):
        space = source.load(sheets.wrong_file(vote), f"<{name} {vote.number}>")
        report = examine(one, space[one.function])
        failed = {result.case.name for result in report.failed}
        assert vote.wrong.case in failed and not failed & ({*vote.choices} - {vote.wrong.case})
