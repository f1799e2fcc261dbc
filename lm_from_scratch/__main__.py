"""The command line: ``python -m lm_from_scratch train | generate | classify | check | doctor``, or
``lm-from-scratch`` in its place.

Whatever goes wrong with a value, a file or the output is one line on stderr and exit code 2, and so
is what a signal ends, with 128 and its number.
"""

from lm_from_scratch import signals

if __name__ == "__main__":
    signals.watch()  # before anything larger is imported

import argparse
import contextlib
import errno
import io
import os
import signal
import sys
import warnings
from collections.abc import Sequence
from importlib import import_module

from lm_from_scratch.program import MODULE, PROGRAM

COMMANDS = {
    "train": "train a GPT-2 or a Qwen2 on text",
    "generate": "let a model continue a text",
    "classify": "let a model label texts",
    "quantize": "write a model with weights of 8 or 4 bits",
    "convert": "write a model in another dtype, or in smaller files",
    "describe": "which ideas the model of a config.json uses",
    "doctor": "what runs here, and how to fix what does not",
}

#: How writing fails: no room, a file that may not grow, a device or a terminal that is gone.
FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF}


def parser(words: Sequence[str] = ()) -> argparse.ArgumentParser:
    """The argument parser, with examples for every command that has options.

    Only the command that ``words`` begin with is imported; without words, all are.
    """
    keep = argparse.RawDescriptionHelpFormatter
    top = argparse.ArgumentParser(
        prog=PROGRAM,
        description="Train a small language model, let one speak, shrink one, and check what runs "
        "here.",
    )
    commands = top.add_subparsers(required=True, metavar="command")
    for name, text in COMMANDS.items():
        p = commands.add_parser(name, help=text, formatter_class=keep)
        p.register("type", None, as_text)  # of options without a type: paths have one
        if not words or words[0] == name:
            command = import_module(f"lm_from_scratch.commands.{name}")
            p.set_defaults(run=command.run)
            command.add_options(p)
    if not words or words[0] not in COMMANDS:
        from lm_from_scratch.exercises.commands import add_commands

        add_commands(commands, keep)
    for p in commands.choices.values():
        p.epilog = p.epilog and p.epilog.replace(MODULE, PROGRAM)
    return top


def as_text(word: str) -> str:
    """An argument as UTF-8, where the locale has made something else of it; a path must stay as it
    is. What is no UTF-8 stays too: the tokenizer says so."""
    with contextlib.suppress(UnicodeError):
        return os.fsencode(word).decode()
    return word


def take_any_text() -> None:
    """Read UTF-8, whatever the locale says, and print what the output has no character for as a
    question mark. Without stderr, nothing is said there."""
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(encoding="utf-8-sig")
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
    if sys.stderr is None:
        sys.stderr = os.fdopen(os.open(os.devnull, os.O_WRONLY), "w")


def main(argv: list[str] | None = None) -> int:
    """Run one command; a bad value, a file that cannot be read or written, and an output that is
    closed or full become one line on stderr and exit code 2."""
    words = sys.argv[1:] if argv is None else argv
    try:
        try:
            if sys.stdout is None:
                raise ValueError("the output is closed")
            args = parser(words).parse_args(words)
            signals.handle(signals.raise_ended)
            return args.run(args)
        finally:
            if sys.stdout is not None:
                sys.stdout.flush()  # a full disk is met here, not after the end
    except BrokenPipeError:  # the reader, `head` say, has seen enough
        throw_away_output()
        return 0
    except ModuleNotFoundError as error:
        if not error.name or error.name.startswith(__package__):
            raise
        here = f"error: this Python, {sys.executable}, has no {error.name}"
        return said(f"{here}: activate the environment that make install has made, .venv", 2)
    except (ValueError, FloatingPointError, OSError) as error:
        return said(f"error: {reason(error)}", 2)
    except KeyboardInterrupt as error:
        number = error.args[0] if isinstance(error, signals.Ended) else signal.SIGINT
        return said(signals.ending(number), 128 + number)


def reason(error: Exception) -> str:
    """What went wrong, in one line; with files, which and why."""
    if isinstance(error, OSError) and error.strerror:
        where = error.filename
        if where is None and error.errno in FULL:  # files say their names
            where = "the output"
            throw_away_output()
        return error.strerror if where is None else f"{os.fsdecode(where)}: {error.strerror}"
    return " ".join(str(error).splitlines())


def throw_away_output() -> None:
    """What waits to be printed cannot be; Python would try again at the end."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def said(line: str, code: int) -> int:
    """The exit code, after a last line; the terminal may be gone."""
    with contextlib.suppress(OSError):
        print(line, file=sys.stderr, flush=True)
    return code


def script() -> None:
    """What ``lm-from-scratch`` calls."""
    signals.watch()
    start()


def start() -> None:
    """The whole program."""
    take_any_text()
    warnings.formatwarning = lambda message, *about, **more: f"warning: {message}\n"
    code = main()
    signals.handle(signal.SIG_IGN)  # it is over
    sys.exit(code)


if __name__ == "__main__":
    start()
