"""The folder of a run: who may write there, its log, and how to go on from it.

A folder holds one run: the recipe, a log with a line for each step, and checkpoints. Starting
the same run there again continues it.
"""

import contextlib
import json
import os
import signal
import sys
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from tqdm import tqdm

from lm_from_scratch.checkpoint.state import latest_checkpoint
from lm_from_scratch.files import naming, whole_file
from lm_from_scratch.runs.distributed import Processes
from lm_from_scratch.signals import ENDING
from lm_from_scratch.training.train import Step

#: Python has no such flag on Windows.
NO_LINK = getattr(os, "O_NOFOLLOW", 0)


@contextmanager
def only_run_in(out: Path) -> Iterator[None]:
    """Hold the lock of a folder; a second run in it would destroy the first. Raises ``ValueError``
    where another run holds it, and for a folder with files in which no run has begun."""
    is_new = not out.exists()
    out.mkdir(parents=True, exist_ok=True)
    names = sorted(path.name for path in out.iterdir())
    if names and not {".lock", "recipe.json"} & {*names}:  # a run that was killed leaves its lock
        raise ValueError(
            f"{out} is left as it is, because it holds files, and none of a run: {names[:5]}; "
            "give another --out"
        )
    lock = out / ".lock"
    if lock.is_symlink():
        raise ValueError(f"{lock} is a link to another file: remove it")
    with open(os.open(lock, os.O_RDWR | os.O_CREAT | NO_LINK, 0o666)) as file:
        try:
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except ImportError:
            pass  # Windows: no lock
        except OSError as error:
            raise ValueError(f"another run is using {out}") from error
        try:
            yield
        finally:
            if [*out.iterdir()] == [lock]:  # a run that was refused leaves nothing behind
                lock.unlink()
                if is_new:
                    out.rmdir()


@dataclass(frozen=True)
class Stop:
    """A run was ended before its last step."""

    step: int  # the last one that was taken
    signal: int  # what ended it


def follow(
    steps: Generator[Step, None, None],
    log: Path,
    total: int,
    done: int,
    quiet: bool,
    group: Processes,
) -> Stop | None:
    """Log and show the steps of a run, until the last one or a signal. Whatever ends it, a
    checkpoint of the last whole step is written."""
    without_bar = quiet or group.rank > 0 or sys.stderr is None
    stop: list[int] = []  # a signal ends the run between two steps, never inside one
    signals = [s for s in ENDING if signal.getsignal(s) is not signal.SIG_IGN]
    previous = {s: signal.signal(s, lambda number, frame: stop.append(number)) for s in signals}
    try:
        with (
            contextlib.closing(steps),
            open(log, "a") as file,
            tqdm(total=total, initial=done, unit="step", disable=without_bar) as bar,
        ):
            for step in steps:
                numbers = {k: None if v != v else v for k, v in asdict(step).items()}  # NaN
                with naming(log):
                    file.write(json.dumps(numbers) + "\n")
                    file.flush()
                bar.update()
                value = f"loss {step.loss:.3f}"
                if step.reward is not None:  # the loss says nothing where rewards are learned from
                    value = f"reward {step.reward:.3f}"
                bar.set_postfix_str(
                    f"{value}, lr {step.lr:.1e}, {step.tokens_per_second:.0f} tokens/s"
                )
                if step.held_out_loss is not None:
                    bar.write(f"step {step.step}: held-out loss {step.held_out_loss:.4f}")
                (stops,) = group.total(len(stop))  # all processes stop after the same step
                if stops and step.step < total:
                    steps.close()  # writes a checkpoint
                    return Stop(step.step, stop[0] if stop else signal.SIGINT)
    except RuntimeError:  # a process was lost: torchrun ends this one too, which has a word to say
        if group.parallel:
            previous[signal.SIGTERM] = signal.SIG_IGN
        raise
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
    return None


def cut_log(log: Path, done: int) -> None:
    """Keep the lines up to step ``done``: a killed run may have written past its checkpoint."""
    if log.is_file():
        lines = [line for line in log.read_text().splitlines() if 0 < logged_step(line) <= done]
        with whole_file(log) as temporary:
            temporary.write_text("".join(line + "\n" for line in lines))


def logged_step(line: str) -> int:
    """The step of a line of the log; 0 if the line was cut off."""
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return 0


def how_to_go_on(out: Path) -> str:
    """What is left of a run that ended too early."""
    checkpoint = latest_checkpoint(out)
    last = f"the last checkpoint is {checkpoint}" if checkpoint else "there is no checkpoint yet"
    return f"{last}. The same command goes on from there"
