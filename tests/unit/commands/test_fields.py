"""commands/fields.py: a command line from the fields of a dataclass, and back."""

from argparse import ArgumentParser
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import pytest

from lm_from_scratch.commands.fields import Command, Name, Options, option
from lm_from_scratch.limits import Count, Limit


@dataclass(frozen=True, kw_only=True)
class Numbers(Options):
    source: Name = option("a file", positional=True)
    n_thing: Count = option("how many", 3)
    share: float | None = option("of it; default: all", None)
    kind: Literal["plain", "fancy"] = option("what it is like", "plain")
    loud: bool = option("say so", False)
    words: tuple[str, ...] = option("some", ())
    from_: str = option("a word of Python", "here")
    scale: float = option("a factor", 0.0, flag="--its-scale")
    least: Annotated[int, Limit("exceeds n_thing={n_thing}", int.__le__, "n_thing")] = option("", 0)


NUMBERS = Command("numbers", (Numbers,), "nowhere:run")


def parse(*words: str, command: Command = NUMBERS) -> Any:
    p = ArgumentParser()
    command.add_to(p)
    return command.options_of(p.parse_args(words))


def test_what_is_typed_has_the_type_of_its_field_and_the_rest_its_default() -> None:
    assert parse("file") == Numbers(source="file")
    words = "file --n-thing 4 --share 1 --kind fancy --loud --words a b --from there --its-scale 2"
    assert parse(*words.split()) == Numbers(
        source="file", n_thing=4, share=1.0, kind="fancy", loud=True, words=("a", "b"),
        from_="there", scale=2.0,
    )  # fmt: skip
    assert type(parse("file", "--sh", "1").share) is float  # the beginning of a name is enough


@pytest.mark.parametrize(
    "words",
    ["", "f --n-thing 1.5", "f --kind odd", "f --other 1", "f --s x", "f --words", " --loud"],
)
def test_what_is_no_value_is_refused(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        parse(*words.split())
    assert stop.value.code == 2 and "error: " in capsys.readouterr().err


def test_a_number_out_of_its_limit_is_named_as_it_was_typed() -> None:
    with pytest.raises(ValueError, match=r"^--n-thing 0 must be an integer, at least 1$"):
        parse("file", "--n-thing", "0")
    with pytest.raises(ValueError, match=r"^--least 4 exceeds --n-thing 3$"):
        parse("file", "--least", "4")


@pytest.mark.parametrize(
    ("message", "typed"),
    [
        ("scale=2 and from_=x do not fit", "--its-scale 2 and --from x do not fit"),
        ("n_thing=1: no other=2", "--n-thing 1: no other=2"),
        ("runs/scale=2 is a file", "runs/scale=2 is a file"),
        ("other=2 needs scale=1", "other=2 needs scale=1"),
    ],
)
def test_an_error_of_the_library_names_what_was_typed(message: str, typed: str) -> None:
    with pytest.raises(ValueError, match=f"^{typed}$"), NUMBERS.naming_flags():
        raise ValueError(message)


def test_the_help_has_meanings_and_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse("--help")
    lines = [line.split("  ")[-1].strip() for line in capsys.readouterr().out.splitlines()]
    for text in (
        "how many; default: 3", "of it; default: all", "what it is like; default: plain", "say so",
        "some", "a factor; default: 0.0",
    ):  # fmt: skip
        assert text in lines
