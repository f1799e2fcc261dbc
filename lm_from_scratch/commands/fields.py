"""The command line, from the fields of frozen dataclasses and back.

A field says all of an option: its type what may be typed, its default what holds otherwise, and
:func:`option` the words of ``--help``::

    steps: Count = option("length of the run", 300)

makes ``--steps N``. What the command line does not say is None, and left to the dataclass. No file
that holds such a dataclass imports torch: ``--help`` is there at once.
"""

import contextlib
import os
import re
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Callable, Iterator
from dataclasses import MISSING, Field, dataclass, field, fields
from typing import Annotated, Any, ClassVar, Literal, get_args, get_origin

from lm_from_scratch.limits import check

#: The name of a file, a folder or a model: its bytes stay as they were typed.
Name = Annotated[str, "a name"]


def option(help: str, default: Any = MISSING, **how: Any) -> Any:
    """A field that the command line fills; without a ``default`` it must be given.

    ``how`` goes to ``ArgumentParser.add_argument``; a ``flag`` stands for ``--the-name``, and
    ``positional=True`` for an argument without one.
    """
    return field(default=default, metadata={"help": help, **how})


class Options:
    """The base of what a command takes: its numbers are checked."""

    #: The heading over these options in ``--help``.
    GROUP: ClassVar[str] = ""

    def __post_init__(self) -> None:
        check(self)

    @classmethod
    def flag(cls, name: str) -> str:
        """How the command line calls a field; one that is a word of Python ends in ``_``."""
        (how,) = (one.metadata for one in fields(cls) if one.name == name)  # type: ignore[arg-type]
        return how.get("flag", "--" + name.rstrip("_").replace("_", "-"))


@dataclass(frozen=True, kw_only=True)
class NoOptions(Options):
    """Of a command that takes none."""


@dataclass(frozen=True)
class Command:
    """A command: the line about it, the dataclasses of its options, and the function that runs it,
    as ``module:function``."""

    summary: str
    options: tuple[type[Options], ...]
    run: str
    description: str = ""
    examples: str = ""
    read: Callable[..., Any] | None = None  # makes the options from what is given, if not the class
    required: tuple[str, ...] | None = None  # what must be given, if not all without a default

    def add_to(self, p: ArgumentParser) -> None:
        """Arguments for all fields, in each class its own before those of its bases."""
        p.set_defaults(command=self)
        known: set[str] = set()
        for options in self.options:
            place = p.add_argument_group(options.GROUP) if options.GROUP else p
            own = options.__annotations__
            for one in sorted(fields(options), key=lambda one: one.name not in own):  # type: ignore[arg-type]
                if one.name not in known:
                    known.add(one.name)
                    missing = one.default is MISSING
                    required = missing if self.required is None else one.name in self.required
                    add_option(place, one, options.flag(one.name), required)

    def options_of(self, args: Namespace) -> Any:
        """The options that the command line says; None is what it does not say. Raises
        ``ValueError`` for a value that is none."""
        given = {name: v for name, v in vars(args).items() if v is not None and name != "command"}
        make = self.read or self.options[0]
        with self.naming_flags():
            return make(**{k: tuple(v) if isinstance(v, list) else v for k, v in given.items()})

    @contextlib.contextmanager
    def naming_flags(self) -> Iterator[None]:
        """A ``ValueError`` that begins with a field, as ``min_lr=2.0 must not exceed lr=1.0``, then
        names the options as they are typed: ``--min-lr 2.0 must not exceed --lr 1.0``."""
        try:
            yield
        except ValueError as error:
            flags = {
                one.name: options.flag(one.name)
                for options in self.options
                for one in fields(options)  # type: ignore[arg-type]
            }
            if str(error).partition("=")[0] not in flags:
                raise
            names = re.compile(rf"\b({'|'.join(flags)})=")
            raise ValueError(names.sub(lambda name: f"{flags[name[1]]} ", str(error))) from error


def add_option(p: Any, one: Field[Any], flag: str, required: bool) -> None:
    """An argument for one field."""
    how = {"default": None, **typed(one.type), **one.metadata}
    how.pop("flag", None)
    shown = isinstance(one.default, int | float | str) and not isinstance(one.default, bool)
    if shown and one.default != "" and "default: " not in how["help"]:
        how["help"] += f"; default: {one.default}"
    if not how.pop("positional", False):
        p.add_argument(flag, dest=one.name, required=required, **how)
        return
    if not required:
        how["nargs"] = "*" if "nargs" in how else "?"
    p.add_argument(one.name, **how)


def typed(kind: Any) -> dict[str, Any]:
    """What a type says to ``add_argument``."""
    if type(None) in get_args(kind):  # of `Count | None`: Count
        kind = get_args(kind)[0]
    if kind is bool:
        return {"action": "store_true"}
    if get_origin(kind) is Literal:
        words = get_args(kind)
        return {"choices": words, "type": type(words[0])}
    if get_origin(kind) is tuple:
        return {"nargs": "+", **typed(get_args(kind)[0])}
    if kind is Name:
        return {"type": not_empty}
    plain = get_args(kind)[0] if get_origin(kind) is Annotated else kind
    return {"type": as_text if plain is str else plain}


def plain(options: Any) -> dict[str, Any]:
    """The values of a dataclass of options, by the names under which a run keeps them."""
    return {
        one.name.rstrip("_"): list(value)
        if isinstance(value := vars(options)[one.name], tuple)
        else value
        for one in fields(options)
    }


def as_text(word: str) -> str:
    """An argument as UTF-8, where the locale has made something else of it. What is no UTF-8 stays:
    the tokenizer says so."""
    with contextlib.suppress(UnicodeError):
        return os.fsencode(word).decode()
    return word


def not_empty(word: str) -> str:
    """A name that must not be empty: an empty path would be the folder one is in."""
    if not word.strip():
        raise ArgumentTypeError("an empty name; a dot is the folder that you are in")
    return word
