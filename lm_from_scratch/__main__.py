"""The command line: ``python -m lm_from_scratch COMMAND``, or ``lm-from-scratch`` in its place;
``--help`` lists the commands.

Any error in a value, a file or the output is reported as one line on stderr, with exit code 2. A
signal is reported the same way, with exit code 128 plus its number.
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
from importlib import import_module
from typing import Any

from lm_from_scratch.commands.options import COMMANDS as MODELS
from lm_from_scratch.exercises.options import COMMANDS as EXERCISES
from lm_from_scratch.files import escaped
from lm_from_scratch.program import MODULE, PROGRAM

#: How writing fails: no room, a file that may not grow, a device or a terminal that is gone.
FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF}


def parser() -> argparse.ArgumentParser:
    """The argument parser; what a command does is imported when it runs."""
    top = argparse.ArgumentParser(
        prog=PROGRAM,
        description="Train a small language model, let one speak, shrink one, and check what runs "
        "here.",
    )
    commands = top.add_subparsers(required=True, metavar="command")
    for name, command in {**MODELS, **EXERCISES}.items():
        command.add_to(
            commands.add_parser(
                name,
                help=command.summary,
                description=command.description or f"{command.summary}.",
                epilog=command.examples.replace(MODULE, PROGRAM),
                formatter_class=argparse.RawDescriptionHelpFormatter,
            )
        )
    return top


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
            args = parser().parse_args(words)
            options = options_of(args)
            module, _, function = args.command.run.partition(":")
            run = getattr(import_module(module), function)
            signals.handle(signals.raise_ended)
            with args.command.naming_flags():
                return run(options)
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
        return exit_with(f"{here}: activate the environment that make install has made, .venv", 2)
    except (ValueError, FloatingPointError, OSError) as error:
        if output_failed(error):
            throw_away_output()
        return exit_with(f"error: {reason(error)}", 2)
    except KeyboardInterrupt as error:
        number = error.args[0] if isinstance(error, signals.Ended) else signal.SIGINT
        return exit_with(signals.ending(number), 128 + number)


def options_of(args: argparse.Namespace) -> Any:
    """The options of the command. Under torchrun, only rank 0 reports a bad value."""
    try:
        return args.command.options_of(args)
    except ValueError:
        if int(os.environ.get("RANK", 0)) > 0:
            raise SystemExit(2) from None
        raise


def output_failed(error: Exception) -> bool:
    """Whether it was the output that could not be written: an error with a file names it."""
    return isinstance(error, OSError) and error.filename is None and error.errno in FULL


def reason(error: Exception) -> str:
    """What went wrong, in one line; with files, which and why."""
    if isinstance(error, OSError) and error.strerror:
        where = "the output" if output_failed(error) else error.filename
        where = None if where is None else escaped(os.fsdecode(where))
        return error.strerror if where is None else f"{where}: {error.strerror}"
    return escaped(" ".join(str(error).splitlines()))


def throw_away_output() -> None:
    """What waits to be printed cannot be; Python would try again at the end."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def exit_with(line: str, code: int) -> int:
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
