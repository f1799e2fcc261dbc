"""What a student wrote runs the model: what is shown, compared and said."""

import pytest
import torch

from lm_from_scratch.exercises import playing as module
from lm_from_scratch.exercises.card import has_part
from lm_from_scratch.exercises.exercise import exercise, exercises
from lm_from_scratch.exercises.parts import part, untrained
from lm_from_scratch.exercises.playing import (
    LENGTHS,
    Shown,
    agreement,
    alone,
    perform,
    play,
    play_together,
    stages,
)
from lm_from_scratch.exercises.source import answer

PARTS = [e.name for e in exercises() if has_part(e.name)]


@pytest.fixture(autouse=True)
def short(monkeypatch) -> None:
    lengths = {"write": 12, "batch": 4, "search": 3, "draft": 6, "learn": 9}
    monkeypatch.setattr(module, "LENGTHS", lengths)


def test_a_right_function_and_a_wrong_one_are_shown_beside_the_package_s(capsys) -> None:
    assert play("rms_norm", answer(exercise("rms_norm")))
    said = capsys.readouterr().out
    assert "rms_norm: every norm, in a model that writes" in said
    assert "with yours: all 12 are the same" in said and "with a wrong one (" in said
    assert said.count("The function returns ... ") == 3


def test_drafts_are_shown_with_a_bar_after_each_pass(capsys) -> None:
    assert play("speculative", answer(exercise("speculative")))
    said = capsys.readouterr().out
    assert "in a model that writes from drafts" in said
    assert "|" in said and "If the value ... " in said


@pytest.mark.slow
def test_all_at_once_and_what_is_missing_is_said(capsys) -> None:
    functions = {name: answer(exercise(name)) for name in PARTS if name != "swiglu"}
    assert play_together(functions, {"swiglu": "3 of 5 checks"})
    said = capsys.readouterr().out
    assert said.count("■") == len(PARTS) - 1 and said.count("□") == 1
    assert "3 of 5 checks" in said and said.count("are the same") == 6
    for does in ("writes", "writes, rounded", "searches", "writes from drafts", "learns"):
        assert f"it {does}: all " in said


def test_a_loop_of_its_own_runs_only_if_its_answer_is_there() -> None:
    assert [loop for _, loop, _ in stages(["rms_norm"])] == ["write", "learn"]
    assert [loop for _, loop, _ in stages(["rms_norm", "beam_step"])] == [
        "write", "search", "learn",
    ]  # fmt: skip
    assert [names for _, _, names in stages(["left_padding", "attention"])] == [
        ["attention"], ["left_padding"], ["attention"],
    ]  # fmt: skip


@pytest.mark.slow
def test_no_two_parts_take_each_other_s_place(monkeypatch) -> None:
    """In each stage, one that raises ends the run: it is at work there."""

    def broken(*args, **kwargs):
        raise ValueError

    monkeypatch.setattr(module, "LENGTHS", module.LENGTHS | {"search": 1, "draft": 1, "learn": 9})
    for _, loop, names in stages(PARTS):
        for name in names:
            functions = {n: exercise(n).reference for n in names} | {name: broken}
            assert perform(functions, loop).error, (name, loop)


def test_what_is_not_written_or_raises_is_told_and_ends_nothing(capsys) -> None:
    def stub(*args):
        raise NotImplementedError

    def broken(x, weight, eps=1e-6):
        return x @ torch.ones(3)

    assert not play("rms_norm", stub)
    assert capsys.readouterr().out.endswith("in a model that writes\nnot written yet\n")
    assert not play("rms_norm", broken)
    assert "stopped after 0 of 12 by RuntimeError: " in capsys.readouterr().out


def test_one_that_stops_on_the_way_keeps_what_it_has_written() -> None:
    calls = iter(range(200))

    def tired(x, weight, eps=1e-6):
        if next(calls) == 99:
            raise ValueError("tired\nof it")
        return exercise("rms_norm").reference(x, weight, eps)

    found = perform({"rms_norm": tired})
    assert found.error == "ValueError: tired" and 0 < len(found.values) < 12
    assert found.same(perform({})) == len(found.values)


def test_the_package_s_functions_run_before_the_student_s(monkeypatch) -> None:
    """One that replaces a function of torch spoils its own run alone."""
    monkeypatch.setattr(module, "_KEPT", {})
    rsqrt = torch.rsqrt

    def spoils(x, weight, eps=1e-6):
        torch.rsqrt = torch.abs
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight

    try:
        assert not alone("rms_norm", spoils).complete
    finally:
        torch.rsqrt = rsqrt


def test_an_exercise_without_a_place_is_refused_with_those_that_have_one() -> None:
    with pytest.raises(ValueError, match=r"checker has no place in a model; .*rms_norm"):
        module.alone("checker", len)


def test_losses_are_compared_to_two_decimals_and_lengths_count() -> None:
    assert Shown([1.0, 2.0, 3.0]).same(Shown([1.001, 2.0, 3.5])) == 2
    assert Shown([1.0]).same(Shown([1.0, 2.0])) == 1
    assert Shown([float("nan")]).same(Shown([1.0])) == 0
    for own, right in (([1.0], [1.0, 2.0]), ([1.0, 2.0], [1.0])):
        found = agreement(Shown(own), Shown(right))
        assert (found.same, found.of, found.complete) == (1, 2, False)
    assert not agreement(Shown([1.0], error="ValueError"), Shown([1.0])).complete


def test_nothing_is_left_behind_in_the_shipped_model() -> None:
    before = perform({}).values
    perform({"rms_norm": lambda x, weight, eps: x * 0})
    assert perform({}).values == before
    assert untrained().model.config.n_layer == 2


def test_every_part_names_a_loop() -> None:
    found = [part(name) for name in PARTS]
    assert {one.loop for one in found} == set(LENGTHS)
    assert {loop for one in found for loop in one.apart} < set(LENGTHS)
