"""Each part of the model: right answers change nothing, a wrong one shows."""

import plays
import pytest
from exercise_bench import right_answers

from lm_from_scratch.exercises import playing as module
from lm_from_scratch.exercises.card import has_part
from lm_from_scratch.exercises.exercise import exercise, exercises
from lm_from_scratch.exercises.parts import part
from lm_from_scratch.exercises.playing import LENGTHS, alone, perform
from lm_from_scratch.exercises.source import answer

PARTS = [e.name for e in exercises() if has_part(e.name)]
RECORDED = plays.stored()


@pytest.fixture
def short(monkeypatch) -> None:
    lengths = {"write": 8, "batch": 4, "search": 4, "draft": 5, "learn": 9}
    monkeypatch.setattr(module, "LENGTHS", lengths)


# Of each loop one part, for `make test`; all of them take a minute.
OF_EACH_LOOP = {part(name).loop: name for name in PARTS}.values()


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [n if n in OF_EACH_LOOP else pytest.param(n, marks=pytest.mark.slow) for n in PARTS]
)
def test_every_right_answer_does_the_same(name: str, short) -> None:
    """Here for a few tokens and steps; plays.py repeats it at full length."""
    wanted = exercise(name)
    for label, function in right_answers(wanted).items():
        found = alone(name, function)
        assert found.complete and found.of >= 4, (label, found)


EXACT = [n for n in PARTS if part(n).loop != "learn" and not part(n).rounds]


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(n, marks=[pytest.mark.slow] * (n == "beam_step"))  # a search takes a second
        for n in EXACT
        if n not in ("top_p", "ring_cache")
    ],
)
def test_with_the_package_s_own_function_it_is_the_shipped_model(name: str, short) -> None:
    """But where the part draws from another distribution, or sees less."""
    loop = part(name).loop
    own = perform({name: exercise(name).reference}, loop)
    assert not own.error and own.values == perform({}, loop).values


@pytest.mark.parametrize("name", PARTS)
def test_what_is_recorded_of_wrong_answers_is_of_these(name: str) -> None:
    """Something else was planted, or a part has changed: run plays.py for this name."""
    wanted, found = exercise(name), RECORDED[name]
    assert list(found["wrong"]) == [wrong.label for wrong in wanted.wrong]
    assert found["loop"] == part(name).loop
    shows = [at for at in found["wrong"].values() if isinstance(at, int)]
    assert shows and all(1 <= at <= found["of"] + 1 for at in shows)


@pytest.mark.slow
@pytest.mark.parametrize("name", PARTS)
def test_the_first_wrong_answer_that_shows_does_so_where_it_is_recorded(name: str) -> None:
    wanted, found = exercise(name), RECORDED[name]["wrong"]
    label, at = min((p for p in found.items() if isinstance(p[1], int)), key=lambda p: p[1])
    (wrong,) = (w for w in wanted.wrong if w.label == label)
    lengths = {"write": 40, "batch": 20, "search": 12, "draft": 30, "learn": 40}
    assert lengths == LENGTHS, "the recorded runs had other lengths"
    with pytest.MonkeyPatch.context() as patch:
        if part(name).loop == "learn" and name != "lr_schedule":  # whose steps depend on the last
            patch.setattr(module, "LENGTHS", LENGTHS | {"learn": at})
        assert plays.seen(name, answer(wanted, wrong.answer)) == at
