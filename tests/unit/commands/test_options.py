"""commands/options.py: options are made from the fields of a dataclass."""

import argparse
from dataclasses import dataclass, fields
from typing import Literal

import pytest

from lm_from_scratch.__main__ import parser
from lm_from_scratch.commands.options import add_fields, given
from lm_from_scratch.generation.sampling import Sampler
from lm_from_scratch.runs.config import TrainConfig


@dataclass
class Numbers:
    n_thing: int = 3  # how many (a remark for those who read the class)
    share: float = 0.5  # of n_thing
    width: int | None = None  # of it (None: computed)
    kind: Literal["plain", "fancy"] = "plain"  # what it is like
    loud: bool = False  # say so
    word: str = "a"  # a word
    inside: tuple[int, int] = (1, 2)  # nothing for the command line


def parse(*words: str, **defaults: object) -> dict[str, object]:
    p = argparse.ArgumentParser()
    names = ["n_thing", "share", "width", "kind", "loud", "word"]
    add_fields(p, Numbers, names, {"word": ("a", "b")}, **defaults)
    p.add_argument("--other")
    return given(p.parse_args(words), Numbers)


def test_what_is_given_has_the_type_of_its_field_and_the_rest_is_absent() -> None:
    assert parse() == {"loud": False}
    said = parse("--n-thing", "4", "--share", "1", "--width", "5", "--kind", "fancy", "--loud")
    assert said == {"n_thing": 4, "share": 1.0, "width": 5, "kind": "fancy", "loud": True}
    assert type(said["share"]) is float and parse("--word", "b", "--other", "x")["word"] == "b"


@pytest.mark.parametrize(
    "words", ["--n-thing 1.5", "--kind odd", "--word c", "--inside 1", "--sh x"]
)
def test_what_does_not_fit_is_refused(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        parse(*words.split())
    assert stop.value.code == 2 and "error: " in capsys.readouterr().err


def test_the_help_is_the_comment_beside_a_field(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse("--help", share=None, width="as wide as it is", word="b")
    lines = [line.split("  ")[-1].strip() for line in capsys.readouterr().out.splitlines()]
    for said in (
        "how many; default: 3", "of n-thing", "of it; default: as wide as it is",
        "what it is like; default: plain", "say so", "a word; default: b",
    ):  # fmt: skip
        assert said in lines


def test_an_option_that_is_not_given_leaves_the_number_to_the_dataclass() -> None:
    run = parser().parse_args(["train", "--out", "run", "--rank", "7"])
    assert given(run, TrainConfig)["rank"] == 7 and "scale" not in given(run, TrainConfig)
    assert given(parser().parse_args(["generate"]), Sampler) == {}


def test_every_number_of_a_sampler_is_an_option() -> None:
    words = [x for f in fields(Sampler) for x in ("--" + f.name.replace("_", "-"), "1")]
    said = given(parser().parse_args(["generate", *words]), Sampler)
    assert Sampler(**said) == Sampler(**dict.fromkeys((f.name for f in fields(Sampler)), 1))
