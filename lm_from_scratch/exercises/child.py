"""Check a file in a process of its own, with limits, so that nothing it does ends the caller.

The child takes as little as the system allows: processor time, memory, no files. Where Linux
allows that too, it is shut in (`seal.py`): no network, nothing written or deleted. Against an
attacker that is not enough: the code can still read files, and forge the points of the check, with
which it shares a process. Code that looks like it is not passed, and the verdict says why.
"""

import ast
import contextlib
import json
import multiprocessing
import os
import secrets
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Annotated, Any

import torch

from lm_from_scratch.exercises.exercise import Exercise, exercise
from lm_from_scratch.exercises.report import examine, missing
from lm_from_scratch.exercises.seal import seal
from lm_from_scratch.exercises.submission import defined, read
from lm_from_scratch.limits import Limit, NotNegative
from lm_from_scratch.signals import ENDING

SECONDS = 10.0  # of processor time for one file and exercise
PATIENCE = 6  # times as long by the clock: for code that sleeps, on a machine that is busy
MEMORY = 2 << 30  # bytes beyond what the process has
NOTHING = "the process sent no verdict"
#: Names by which code gets at what calls it, at all objects, and at other modules' insides.
INSIDE = {
    "_getframe", "_current_frames", "currentframe", "f_back", "f_locals", "tb_frame", "gi_frame",
    "gc", "get_objects", "get_referrers", "ctypes", "sys.modules", "__subclasses__", "importlib",
    "__import__",
}  # fmt: skip

Texts = Annotated[
    list[str],
    Limit("must be texts", lambda x: isinstance(x, list) and all(isinstance(t, str) for t in x)),
]


@dataclass
class Verdict:
    """What came of one file and one exercise."""

    exercise: str = ""
    points: NotNegative = 0.0
    of: NotNegative = 0.0
    passed: bool = False
    failed: Texts = field(default_factory=list)  # names of cases
    wrong: str = ""  # the misconception that it looks like
    reason: str = ""  # why there are no points, or what else a teacher should know
    text: str = ""  # the report
    seconds: NotNegative = 0.0


@dataclass(frozen=True)
class Job:
    """One file to check for one exercise."""

    file: Path
    name: str
    seed: int = 0
    case: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "file", self.file.absolute())  # a child works in another folder


def verdict(job: Job, seconds: float | None = None) -> Verdict:
    """Check a file in this process. It never raises for what is in the file."""
    wanted = exercise(job.name)
    result = Verdict(wanted.name, of=float(wanted.points))
    if lacks := missing(wanted):  # before the file fails to import it
        result.reason = f"not checked: {lacks}"
        result.text = f"{wanted.name}: {result.reason}"
        return result
    submission = read(job.file)
    try:
        function = defined(submission, wanted.function)
    except ValueError as error:
        result.reason = str(error)
        result.text = f"{wanted.name}: {result.reason}"
        return result
    report = examine(wanted, function, job.seed, job.case, seconds)
    result.points, result.passed = report.points, report.passed
    result.failed = [r.case.name for r in report.failed]
    result.wrong = report.looks_like
    result.text = report.text()
    faults = [r.fault.text.splitlines()[0] for r in report.failed if r.fault]
    if not report.written:
        result.reason = "not written yet"
    elif faults:
        result.reason = faults[0]
    for name in sorted(submission.left_out):
        reason = f"{name} is not defined inside"
        if reason in result.text:
            result.reason = f"{name} is made outside the function, where nothing runs"
    if problems := submission.summary():
        result.text += f"\nThe file: {problems}"
        result.reason = "; ".join(part for part in (result.reason, problems) if part)
    nodes = [node for *_, nodes in submission.parts for node in nodes]
    if any(module.startswith("lm_from_scratch") for module in imports(nodes)):
        result.reason = "; ".join(filter(None, (result.reason, "imports the package")))
    return result


def warned(result: Verdict, file: Path) -> Verdict:
    """The verdict, with a reason that names how the code could get at the check; then it is not
    passed before somebody has read the code."""
    words: set[object] = set()
    for node in (inner for *_, nodes in read(file).parts for n in nodes for inner in ast.walk(n)):
        if isinstance(node, ast.Attribute):
            words |= {node.attr, f"{ast.unparse(node.value)}.{node.attr}"[:100]}
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            words |= {alias.name for alias in node.names} | {getattr(node, "module", "")}
        elif isinstance(node, ast.Constant):
            words.add(node.value)
    if found := sorted(INSIDE & words):
        reason = f"looks into the check: {', '.join(found)}"
        result.reason = "; ".join(filter(None, (result.reason, reason)))
        result.passed = False
    return result


def imports(statements: list[ast.stmt]) -> set[str]:
    """Modules that a file imports, except what its own last cells import: `check` and `play`."""
    modules = set()
    for statement in statements:
        for node in ast.walk(statement):
            if isinstance(node, ast.Import):
                modules |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                names = {alias.name for alias in node.names}
                if not (node.module == "lm_from_scratch.exercises" and names <= {"check", "play"}):
                    modules.add(node.module)
    return modules


def checked(job: Job, seconds: float) -> Verdict:
    """The verdict as a child sends it: not longer than a pipe should carry."""
    result = verdict(job, seconds)
    result.reason, result.text = result.reason[:1000], result.text[:100_000]
    return result


class Child:
    """One job in a process of its own; `result` waits for it, or ends it.

    * ``work``: (job, seconds) -> a dataclass with a ``reason``; by default the check of a file
    """

    def __init__(
        self,
        job: Any,
        seconds: float = SECONDS,
        method: str | None = None,
        work: Callable[[Any, float], Any] = checked,
    ):
        context: Any = multiprocessing.get_context(method or start_method())
        self.job, self.seconds, self.ended = job, seconds, False
        self.started = time.perf_counter()
        start = 0 if context.get_start_method() == "fork" else 20  # torch is imported again
        self.deadline = self.started + PATIENCE * seconds + start
        self.pipe: Connection
        self.pipe, theirs = context.Pipe(duplex=False)
        # Where it works: it leaves nothing behind.
        self.folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        self.word = secrets.token_bytes(16)  # with which a message begins
        given = (theirs, work, job, seconds, self.folder.name, self.word)
        self.process = context.Process(target=_work, args=given, daemon=True)
        with held_signals():
            self.process.start()
        theirs.close()

    def is_done(self) -> bool:
        """Whether there is something to read, or it is time to end."""
        return self.pipe.poll() or time.perf_counter() > self.deadline

    def result(self) -> Verdict:
        """The verdict; a reason and no points if the process ended or was ended without one."""
        wanted = exercise(self.job.name)
        result = Verdict(wanted.name, of=float(wanted.points))
        sent, result.reason = self.message()
        try:
            result = warned(received(sent, wanted), self.job.file) if sent else result
        except (ValueError, TypeError, RecursionError):
            result.reason = NOTHING
        result.seconds = round(time.perf_counter() - self.started, 3)
        result.text = result.text or f"{result.exercise}: {result.reason}"
        return result

    def message(self) -> tuple[bytes, str]:
        """What the process sent, or nothing and why; then it is over."""
        left = max(0.0, self.deadline - time.perf_counter())
        end = threading.Timer(5, self.kill)  # for a message that has begun and does not end
        sent, reason = b"", ""
        try:
            if self.pipe.poll(left):
                end.start()
                sent = self.pipe.recv_bytes(maxlength=1 << 20)
                sent = sent.removeprefix(self.word) if sent.startswith(self.word) else b""
            else:
                reason = f"stopped after {PATIENCE * self.seconds:g} s"
        except EOFError:
            give_up = time.perf_counter() + 1  # it may have closed the pipe, and go on
            while self.process.exitcode is None and time.perf_counter() < give_up:
                time.sleep(0.01)
            reason = ended(self.process.exitcode, self.seconds)
        except OSError:
            reason = NOTHING
        finally:
            end.cancel()
        self.end()
        return sent, reason or ("" if sent else NOTHING)

    def end(self) -> None:
        """Kill the process and what it started; once, because its number may be given again."""
        if not self.ended:  # the pipe says nothing: it closes itself at a message too long
            self.ended = True
            self.kill()
            self.process.join(5)
            self.pipe.close()
            self.folder.cleanup()

    def kill(self) -> None:
        """Kill the group of the process: it is there as long as anyone in it, even when the
        process itself is over."""
        pid = self.process.pid
        if pid is not None and hasattr(os, "killpg"):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, signal.SIGKILL)
        self.process.kill()


@contextlib.contextmanager
def held_signals() -> Iterator[None]:
    """Ctrl-C waits until this is over: Python would lose it in the middle of a fork."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []
    before = {n: signal.signal(n, lambda number, _: came.append(number)) for n in ENDING}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler or signal.SIG_DFL)
        for number in came[:1]:
            signal.raise_signal(number)


def received(message: bytes, wanted: Exercise) -> Verdict:
    """A verdict as the parent can use it: code that writes into the pipe must not end the batch.

    Raises ``ValueError`` for a message that is no verdict.
    """
    result = Verdict(**json.loads(message))
    texts = [*result.failed, result.wrong, result.reason, result.text]
    if (
        not all(isinstance(text, str) for text in texts)
        or not isinstance(result.passed, bool)
        or not 0 <= result.points <= wanted.points
    ):
        raise ValueError("no verdict")
    result.exercise, result.of = wanted.name, float(wanted.points)
    result.passed &= result.points == result.of and not result.failed
    return result


def ended(code: int | None, seconds: float) -> str:
    """Why a process that said nothing is over."""
    if code is None:
        return "the process closed its pipe and went on"
    if code < 0:
        if -code in (getattr(signal, "SIGXCPU", 0), getattr(signal, "SIGKILL", 0)):
            return f"stopped after {seconds:g} s of processor time, or for its memory"
        return f"ended by signal {signal.Signals(-code).name}"
    return f"the code ended the process (exit code {code})"


def start_method() -> str:
    """Forking keeps torch imported: 20 milliseconds instead of 2 seconds. Windows has no fork."""
    return "fork" if sys.platform == "linux" else "spawn"


def ready(children: list[Child]) -> list[Child]:
    """Wait until at least one child is done."""
    first = min(child.deadline for child in children)
    wait([c.pipe for c in children], timeout=max(0.0, first - time.perf_counter()))
    return [child for child in children if child.is_done()]


def _work(
    pipe: Connection,
    work: Callable[[Any, float], Any],
    job: Any,
    seconds: float,
    folder: str,
    word: bytes,
) -> None:
    """The child's side."""
    os.chdir(folder)
    own = pipe.fileno()  # the pipes of other children are theirs
    os.closerange(3, own)
    os.closerange(own + 1, 65536)
    os.environ.pop("LM_FROM_SCRATCH_PROGRESS", None)
    os.environ["TMPDIR"] = tempfile.tempdir = folder  # where torch makes folders for its caches
    _limit(seconds)
    seal(folder)
    torch.set_num_threads(1)
    try:
        result = asdict(work(job, seconds * 0.8))
    except MemoryError:
        result = {"reason": "out of memory"}
    except BaseException as error:  # nothing that the file does may pass for success
        result = {"reason": f"{type(error).__name__}: {error}"[:300]}
    pipe.send_bytes(word + json.dumps(result).encode())
    os._exit(0)  # the student's exit handlers and threads do not run


def _limit(seconds: float) -> None:
    """Its own group, no output, and the limits of the system where it has them."""
    nowhere = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1, 2):
        os.dup2(nowhere, number)
    if hasattr(os, "setsid"):
        os.setsid()
    for number in ENDING:
        signal.signal(number, signal.SIG_DFL)
    try:
        import resource
    except ImportError:  # Windows
        return
    signal.alarm(int(PATIENCE * seconds) + 30)  # should there be no parent any more
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    processor = int(seconds) + 1
    limits = {
        resource.RLIMIT_CPU: (processor, processor + 1),
        resource.RLIMIT_FSIZE: (0, 0),
        resource.RLIMIT_CORE: (0, 0),
    }
    if sys.platform == "linux":  # elsewhere the size of a process is not what it uses
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        most = pages * resource.getpagesize() + MEMORY
        limits[resource.RLIMIT_AS] = (most, most)
    for which, values in limits.items():
        hard = resource.getrlimit(which)[1]
        most = values[1] if hard == resource.RLIM_INFINITY else min(values[1], hard)
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(which, (min(values[0], most), most))
