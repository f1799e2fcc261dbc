"""The checks of every exercise tell right from wrong: they pass what is right and reject what is
wrong, at every seed, and the report names the mistake.

    pytest tests/exercises -k NAME -m "not slow"  one exercise at two seeds, in seconds
    pytest tests/exercises -k NAME                at 100 seeds, with every mutant, by name
"""

import pytest
from exercise_bench import Bench, answers, bench_of, right_answers, second_person, trivial_answers
from mutate import mutants

from lm_from_scratch.exercises.exercise import drafts, exercises
from lm_from_scratch.exercises.run import OutOfTime, time_limit
from lm_from_scratch.exercises.source import answer, load, solution

NAMES = [one.name for one in (*exercises(), *drafts())]
LEAST_WRONG, LEAST_RIGHT = 12, 4
RIGHT_SEEDS, WRONG_SEEDS, SECOND_SEEDS = 100, 30, 10
#: Of `make test`: answers take turns, each is tried at one of them. (Both give the league, whose
#: stories a model must read first, the same stories.)
SEEDS = range(0, 4, 2)


@pytest.fixture(params=NAMES, scope="module")
def bench(request: pytest.FixtureRequest) -> Bench:
    return bench_of(request.param)


def accept_what_is_right(bench: Bench, seeds: range, turns: int = 1) -> None:
    for n, (label, function) in enumerate(right_answers(bench.exercise).items()):
        for seed in seeds[n % turns :: turns]:
            for number in bench.numbers:
                why = bench.rejects(number, function, seed)
                case = bench.exercise.cases[number].name
                assert not why, f"seed {seed}: {case!r} rejects {label!r}: {why}"


def reject_what_is_wrong(bench: Bench, seeds: range, turns: int = 1) -> None:
    """Each by the case that is named for it."""
    places = {case.name: number for number, case in enumerate(bench.exercise.cases)}
    for n, wrong in enumerate(bench.exercise.wrong):
        function = answer(bench.exercise, wrong.answer)
        for seed in seeds[n % turns :: turns]:
            why = bench.rejects(places[wrong.case], function, seed)
            assert why, f"seed {seed}: {wrong.case!r} accepts {wrong.label!r}"
            assert "NameError: " not in why, f"{wrong.label!r} is broken: {why}"


def reject_a_second_person(bench: Bench, seeds: range, turns: int = 1) -> None:
    """Each mistake by some case."""
    for n, (label, function, _) in enumerate(second_person(bench.exercise)):
        for seed in seeds[n % turns :: turns]:
            why = next(filter(None, (bench.rejects(n, function, seed) for n in bench.numbers)), "")
            assert why, f"seed {seed}: nothing rejects {label!r}"
            assert "NameError: " not in why, f"{label!r} is broken: {why}"


def test_enough_is_known_to_be_right_and_wrong(bench: Bench) -> None:
    assert len(bench.exercise.wrong) >= LEAST_WRONG
    assert len(answers(bench.exercise.name)["RIGHT"]) >= LEAST_RIGHT


def test_right_answers_get_all_points(bench: Bench) -> None:
    accept_what_is_right(bench, SEEDS, turns=len(SEEDS))


def test_wrong_answers_are_rejected_by_their_case(bench: Bench) -> None:
    reject_what_is_wrong(bench, SEEDS, turns=len(SEEDS))


def test_mistakes_of_a_second_person_are_rejected(bench: Bench) -> None:
    reject_a_second_person(bench, SEEDS, turns=len(SEEDS))


@pytest.mark.slow
def test_mistakes_of_a_second_person_are_named(bench: Bench) -> None:
    labels = {wrong.label for wrong in bench.exercise.wrong}
    for label, function, unnamed in second_person(bench.exercise):
        if unnamed or label in labels:
            report = bench.examine(function)
            name = report.wrong[0].label if report.wrong else ""
            assert label in labels and name == ("" if unnamed else label), (label, name)


@pytest.mark.slow
def test_wrong_answers_are_named(bench: Bench) -> None:
    """By their own label, unless they raise in every case that they fail, or say why not."""
    for wrong in bench.exercise.wrong:
        report = bench.examine(answer(bench.exercise, wrong.answer))
        named = report.wrong[:1] == [wrong]
        raises = all((r.outcome.again or r.outcome).fault for r in report.failed)
        if wrong.unnamed:
            assert not named, f"{wrong.label!r} is named, but has a reason not to be"
        else:
            assert named or raises, f"{wrong.label!r} is named {report.looks_like!r}"


def test_a_stub_and_trivial_answers_get_nothing(bench: Bench) -> None:
    report = bench.examine(bench.stub())
    assert not report.written
    assert not report.points
    assert "not written yet" in report.text()
    for label, function in trivial_answers():
        assert bench.points(function) == 0, label


@pytest.mark.slow
def test_right_answers_at_a_hundred_seeds(bench: Bench) -> None:
    accept_what_is_right(bench, range(RIGHT_SEEDS))


@pytest.mark.slow
def test_wrong_answers_at_thirty_seeds(bench: Bench) -> None:
    reject_what_is_wrong(bench, range(WRONG_SEEDS))


@pytest.mark.slow
def test_mistakes_of_a_second_person_at_ten_seeds(bench: Bench) -> None:
    reject_a_second_person(bench, range(SECOND_SEEDS))


@pytest.mark.slow
def test_every_mutant_is_rejected_and_every_case_is_needed(bench: Bench) -> None:
    """A mutant of the solution may survive for a reason in writing. A case rejects something that
    no other does, or says what it teaches."""
    rejected = {
        wrong.label: bench.rejected_by(answer(bench.exercise, wrong.answer))
        for wrong in bench.exercise.wrong
    }
    killed = mutants_killed(bench)
    reasons = answers(bench.exercise.name).get("SURVIVORS", {})
    assert sorted(label for label, by in killed.items() if not by) == sorted(reasons)
    assert all(reasons.values())
    for number, case in enumerate(bench.exercise.cases):
        alone = [*rejected.values(), *killed.values()].count([number])
        assert bool(alone) != bool(case.teaching), f"{case.name!r} alone rejects {alone}"


def mutants_killed(bench: Bench) -> dict[str, list[int]]:
    """Of every mutant of the solution the cases that reject it."""
    own = solution(bench.exercise.name, with_given=False)
    given = solution(bench.exercise.name)[: -len(own)]
    return {label: killers(bench, given + code) for label, code in mutants(own)}


def killers(bench: Bench, code: str) -> list[int]:
    """The cases that reject a program: all of them if it cannot even be loaded, or never ends."""
    try:
        with time_limit(5):
            function = load(code, "<mutant>")[bench.exercise.function]
    except (Exception, OutOfTime):
        return [*bench.numbers]
    numbers = []
    for number in bench.numbers:
        if fault := bench.fault(number, function):
            numbers.append(number)
            if fault.kind == "time":
                return [*bench.numbers]
    return numbers


def test_mutants_change_one_thing_each() -> None:
    code = "def f(x, y):\n    'Text 1.'\n    if x > 1:\n        return x.float() + y\n    return -y"
    changed = dict(mutants(code))
    for label in (
        "if x > 1:: x > 1 => x >= 1",
        "if x > 1:: 1 => 2",
        "return x.float() + y: x.float() + y => x.float() - y",
        "return x.float() + y: x.float() => x",
        "return -y: -y => y",
    ):
        assert label in changed, changed.keys()
    assert len(set(changed.values())) == len(changed)
    assert not any("Text" in label for label in changed)
