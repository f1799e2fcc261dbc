"""Signals that ask a program to end: Ctrl-C, ``kill``, a closed terminal.

A command ends by them in one line, without a traceback. While its modules are imported it ends at
once; later by an exception, so that what has begun is tidied up; and a run of training takes them
between two steps, :func:`lm_from_scratch.runs.folder.follow`. This file imports nothing large.
"""

import os
import signal
import sys
from types import FrameType
from typing import Any

#: Windows has fewer of them.
ENDING = [getattr(signal, n) for n in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, n)]


class Ended(KeyboardInterrupt):
    """A signal ends the program; the argument is its number."""


def leave(number: int, frame: FrameType | None = None) -> None:
    """End at once: nothing is at stake, and not all modules let an exception pass while they are
    imported."""
    os.write(2, f"{ending(number)}\n".encode())
    os._exit(128 + number)


def raise_ended(number: int, frame: FrameType | None) -> None:
    """End by an exception."""
    raise Ended(number)


HANDLERS: list[Any] = [leave, raise_ended]


def handle(handler: Any) -> None:
    """Let ``handler`` take the signals, where :func:`watch` has been called before."""
    for number in ENDING:
        if signal.getsignal(number) in HANDLERS:
            signal.signal(number, handler)


def watch() -> None:
    """Look after the signals of this process, but not after those that are ignored, below ``nohup``
    say."""
    # A process that torchrun started may wait for others where no handler runs: SIGTERM ends it.
    for number in ENDING if "RANK" not in os.environ else [signal.SIGINT]:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, leave)
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=lambda: handle(signal.SIG_DFL))
    sys.unraisablehook = lost


def ending(number: int) -> str:
    """How the last line calls it."""
    by = "" if number == signal.SIGINT else f" by {signal.Signals(number).name}"
    return f"interrupted{by}"


def lost(about: Any) -> None:
    """For exceptions that Python can only print: a signal that came there ends the program."""
    if isinstance(about.exc_value, Ended):
        leave(about.exc_value.args[0])
    sys.__unraisablehook__(about)
