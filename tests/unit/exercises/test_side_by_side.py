"""The right result and the given one beside each other, for exercises that no model shows."""

import pytest
import torch

from lm_from_scratch.exercises import side_by_side
from lm_from_scratch.exercises.card import has_part
from lm_from_scratch.exercises.exercise import exercise, exercises
from lm_from_scratch.exercises.playing import play
from lm_from_scratch.exercises.report import missing
from lm_from_scratch.exercises.source import answer

UNSHOWN = [e.name for e in exercises() if not has_part(e.name) and not missing(e)]
#: One that is cheap to run, and a hunt.
QUICK = {"hunt_padded_targets", "latent_attention"}


def test_the_row_with_a_difference_is_marked_and_drawn() -> None:
    right = torch.arange(60.0).view(2, 10, 3)
    given = right.clone()
    given[1, 9, 1], given[1, 9, 2] = torch.nan, torch.inf
    head, names, *rows = side_by_side.beside("result", right, given)
    assert "float32[2,10,3], rows 17 to 19" in head and names.split() == ["right", "given"]
    assert [row.endswith("unlike") for row in rows] == [False, False, True]
    assert "?∞" in rows[2]


@pytest.mark.parametrize(
    ("right", "given"),
    [
        (torch.ones(2), torch.ones(3)),
        (torch.ones(2), torch.ones(2, dtype=torch.complex64)),
        (torch.ones(2), torch.ones(2).to_sparse()),
        (torch.ones(2), torch.ones(2, device="meta")),
        (1.5, 2.5),
        ([1, 2], [2]),
        ("a", None),
    ],
)
def test_what_has_no_picture_is_said_in_words(right, given) -> None:
    first, second = side_by_side.beside("result", right, given)
    assert first.startswith("result, right: ") and second.startswith("result, given: ")


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[pytest.mark.slow] * (n not in QUICK)) for n in UNSHOWN],
)
def test_every_exercise_without_a_model_shows_its_results(name: str, capsys) -> None:
    one = exercise(name)
    assert play(name, one.reference)
    assert "unlike" not in capsys.readouterr().out
    for wrong in one.wrong:
        assert not play(name, answer(one, wrong.answer))
        shown = capsys.readouterr().out
        assert "no model shows it" in shown and "checks hold" in shown


def test_what_is_wrong_is_said_where_no_row_is_marked(capsys) -> None:
    right = exercise("sinkhorn").reference
    assert not play("sinkhorn", lambda *args, **more: right(*args, **more) * (1 + 5e-5))
    shown = capsys.readouterr().out
    assert "expected" in shown and "unlike" not in shown


def test_an_exception_is_said(capsys) -> None:
    def fails(*_, **__):
        raise RuntimeError("nothing here")

    assert not play("yarn", fails)
    assert "nothing here" in capsys.readouterr().out
