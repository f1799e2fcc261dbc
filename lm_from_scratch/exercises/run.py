"""Run one case of an exercise, and leave the process as it was."""

import contextlib
import inspect
import io
import os
import random
import signal
import sys
import sysconfig
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Generator, Tensor

from lm_from_scratch.exercises.compare import GRADIENT_TOLERANCE, MEMORY, Fault, compare
from lm_from_scratch.exercises.exercise import Call, Case, Exercise
from lm_from_scratch.exercises.inputs import turned

#: Code in these places is not the student's.
#:
#: :meta hide-value:
FOREIGN = (
    *{sysconfig.get_path(name) + os.sep for name in ("stdlib", "purelib", "platlib")},
    str(Path(__file__).parents[1]) + os.sep,
    "<frozen",
)
#: What comparing is done with, as it is before any student's code runs.
#:
#: :meta hide-value:
COMPARING = {
    (owner, name): getattr(owner, name)
    for owner, names in (
        (torch, "equal allclose isclose eq ne all any isnan isinf isfinite where abs sum max"),
        (Tensor, "equal allclose isclose eq ne all any isnan isinf isfinite where abs sum max item "
                 "tolist double float clone detach gather sort data_ptr untyped_storage __eq__ "
                 "__ne__ __lt__ __le__ __gt__ __ge__ __bool__ __invert__ __and__ __or__ __sub__"),
    )
    for name in names.split()
}  # fmt: skip


#: Of the second call: its arguments come from seeds that begin so much later, and of so many those
#: are taken that give the shapes and the numbers of the first call.
LATER, TRIES = 500, 6


@dataclass
class Outcome:
    """What a function did in one case.

    * ``changed``: arguments that are not what they were; those of the reference may be written into
    * ``fault``: it raised, or is not written
    * ``again``: what it did when it was called once more with other values; None if it was not
    * ``seed``: of the arguments of the second call
    * ``wrong``: the first thing wrong with it, beside what is wanted
    """

    value: Any = None
    gradients: dict[str, Tensor | None] = field(default_factory=dict)
    changed: tuple[str, ...] = ()
    fault: Fault | None = None
    printed: str = ""
    again: "Outcome | None" = None
    seed: int = 0
    wrong: Fault | None = None


def wanted(exercise: Exercise, number: int, seed: int) -> Outcome:
    """What the reference does in one case, in both calls. The arguments of the second have other
    values, and their tensors another order in memory. Numbers alone are asked for once: whoever
    remembers what came of them is right."""
    case = exercise.cases[number]
    with kept_state(), quiet():
        first = _arguments(case, number, seed)
        alike = [signature(value) for value in values(first)]
        want = _outcome(exercise, number, exercise.reference, first, seed)
        if any(isinstance(value, (Tensor, list, tuple, dict)) for value in values(first)):
            for want.seed in range(seed + LATER, seed + LATER + TRIES):
                second = _arguments(case, number, want.seed)
                if [signature(value) for value in values(second)] == alike:
                    break
            second = in_other_memory(second)
            want.again = _outcome(exercise, number, exercise.reference, second, seed)
    return want


def tried(
    exercise: Exercise,
    number: int,
    function: Callable[..., Any],
    want: Outcome,
    seed: int,
    seconds: float | None = None,
) -> Outcome:
    """What a function does in one case; it is called again if it was right the first time.
    Exceptions become a fault; Ctrl-C passes through.

    * ``want``: what the reference does
    * ``seconds``: end a loop that has taken so much processor time; None waits for ever
    """
    case = exercise.cases[number]
    with kept_state(), quiet() as printed:  # once: it costs as much as a small case
        got = _outcome(exercise, number, function, _arguments(case, number, seed), seed, seconds)
        got.wrong = judge_call(case, got, want)
        if want.again and not got.wrong:
            other = in_other_memory(_arguments(case, number, want.seed))
            got.again = _outcome(exercise, number, function, other, seed, seconds)
            got.seed = want.seed
            if fault := judge_call(case, got.again, want.again):
                plain = _arguments(case, number, want.seed)
                third = _outcome(exercise, number, function, plain, seed, seconds)
                by_memory = judge_call(case, third, want.again) is None
                got.wrong = in_second_call(case, got.again, want, fault, by_memory)
        got.printed = printed.getvalue()
    return got


def _outcome(
    exercise: Exercise,
    number: int,
    function: Callable[..., Any],
    call: Call,
    seed: int,
    seconds: float | None = None,
) -> Outcome:
    """One call."""
    case, names = exercise.cases[number], argument_names(exercise, call)
    before = {
        n: x.detach().clone() if isinstance(x, Tensor) else x for n, x in parts(names, call).items()
    }
    leaves = require_gradients(names, call) if case.gradient else {}
    torch.default_generator.manual_seed(seed)  # torch.manual_seed: slow, and CUDA's too
    random.seed(seed)
    try:
        with time_limit(seconds):
            value = case.use(function, *call.args, **call.kwargs)
            gradients = gradients_of(value, leaves) if case.gradient else {}
            value = detached(value)
    except (Exception, SystemExit, OutOfTime) as error:
        if isinstance(error, NotImplementedError) and not error.args:  # torch's says something
            return Outcome(fault=Fault("stub", "not written yet"))
        kind = "time" if isinstance(error, OutOfTime) else "raised"
        return Outcome(fault=Fault(kind, what_was_raised(error)))
    finally:
        usual_settings()
        replaced = put_back()
    if replaced:
        return Outcome(fault=Fault("changed", f"your code replaced {' and '.join(replaced)}"))
    after = parts(names, call)
    alike = {n for n in after.keys() & before.keys() if same(after[n], before[n])}
    return Outcome(value, gradients, tuple(n for n in before | after if n not in alike))


def in_second_call(
    case: Case, got: Outcome, first: Outcome, fault: Fault, by_memory: bool
) -> Fault:
    """A fault that the first call did not have, in words that say so.

    * ``first``: what was wanted then
    * ``by_memory``: whether the usual order in memory would have been right
    """
    if by_memory:
        text = "right, but not for the same shapes in another order in memory"
        return Fault(MEMORY, f"{text} (is there a view, or as_strided?): {fault.text}")
    text = "right the first time; called again with other numbers of the same shapes"
    if not got.fault and not compare(got.value, first.value, case.tolerance):
        return Fault("values", f"{text}, it gave the first result again: does it remember it?")
    return Fault(fault.kind, f"{text}: {fault.text}")


def judge_call(case: Case, got: Outcome, want: Outcome) -> Fault | None:
    """The first thing wrong with what one call did."""
    if got.fault:
        return got.fault
    if fault := compare(got.value, want.value, case.tolerance):
        return fault
    if changed := [name for name in got.changed if name not in want.changed]:
        few = " and ".join(changed[:3]) + f" and {len(changed) - 3} more" * (len(changed) > 3)
        text = f"it changes its input: your code wrote into its argument {few}"
        return Fault("changed", f"{text}: the caller still needs it")
    for name, expected in want.gradients.items():
        if expected is None:
            continue
        gradient = got.gradients.get(name)
        if gradient is None:
            text = f"no gradient reaches {name}: did you use detach, data, no_grad or item?"
            return Fault("gradient", text)
        if fault := compare(gradient, expected, GRADIENT_TOLERANCE, f"the gradient of {name}"):
            return Fault("gradient", fault.text)
    return None


def arguments(case: Case, number: int, seed: int) -> Call:
    """The arguments of a case; a case of the same exercise with the next number gets others."""
    with kept_state():
        return _arguments(case, number, seed)


def _arguments(case: Case, number: int, seed: int) -> Call:
    torch.default_generator.manual_seed(seed)  # a module in it draws from this one, each time alike
    return case.make(Generator().manual_seed(1000 * seed + number))


def in_other_memory(call: Call) -> Call:
    """The same arguments, their tensors in another order in memory."""
    args, kwargs = turned((call.args, call.kwargs))
    return Call(args, kwargs)


def argument_names(exercise: Exercise, call: Call) -> list[str]:
    """A name for each argument, from the signature of the reference where it has one."""
    try:
        parameters = list(inspect.signature(exercise.reference).parameters)
    except (TypeError, ValueError):
        parameters = []
    count = len(call.args)
    names = parameters[:count] if len(parameters) >= count else []
    names = names or [f"argument {i + 1}" for i in range(count)]
    return [*names, *call.kwargs]


def values(call: Call) -> list[Any]:
    """All arguments, in their order."""
    return [*call.args, *call.kwargs.values()]


def signature(value: Any, inside: bool = False) -> Any:
    """What two arguments share that look alike: the shapes of tensors and lists, and numbers that
    are in no list."""
    if isinstance(value, Tensor):
        return value.shape, value.dtype
    if isinstance(value, (list, tuple)):
        return type(value), tuple(signature(part, True) for part in value)
    if isinstance(value, dict):
        return tuple((key, signature(part, True)) for key, part in value.items())
    if not inside and isinstance(value, (bool, int, float, str, type(None))):
        return value
    return type(value)


def parts(names: list[str], call: Call) -> dict[str, Any]:
    """Every tensor, number and text among the arguments, those in lists and dicts too, by a
    readable name."""
    found: dict[str, Any] = {}

    def add(name: str, value: Any) -> None:
        if isinstance(value, (list, tuple)):
            for i, part in enumerate(value):
                add(f"{name}[{i}]", part)
        elif isinstance(value, dict):
            for key, part in value.items():
                add(f"{name}[{key!r}]", part)
        elif isinstance(value, (Tensor, bool, int, float, str, type(None))):
            found[name] = value

    for name, value in zip(names, values(call), strict=True):
        add(name, value)
    return found


def tensors(names: list[str], call: Call) -> dict[str, Tensor]:
    """The tensors among the parts."""
    return {name: x for name, x in parts(names, call).items() if isinstance(x, Tensor)}


def same(a: Any, b: Any) -> bool:
    """Equal values, NaN with NaN."""
    if not (isinstance(a, Tensor) and isinstance(b, Tensor)):
        return type(a) is type(b) and bool(a == b or (a != a and b != b))
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return torch.equal(a, b) or bool(((a == b) | ((a != a) & (b != b))).all())


def require_gradients(names: list[str], call: Call) -> dict[str, Tensor]:
    """The floating-point arguments by name, which require gradients from now on."""
    floating = {n: x for n, x in tensors(names, call).items() if x.is_floating_point()}
    return {n: x.requires_grad_() for n, x in floating.items()}


def gradients_of(value: Any, leaves: dict[str, Tensor]) -> dict[str, Tensor | None]:
    """Gradients of a fixed random projection of the result: no error can hide in a sum. The order
    of a dict's keys changes nothing."""
    g = Generator().manual_seed(0)
    total: Tensor | None = None
    for _, out in sorted(tensors(["result"], Call((value,), {})).items()):
        direction = torch.randn(out.shape, generator=g, dtype=torch.float64)
        if out.requires_grad:
            term = (out.double() * direction).sum()
            total = term if total is None else total + term
    if total is None:
        return dict.fromkeys(leaves)
    gradients = torch.autograd.grad(total, list(leaves.values()), allow_unused=True)
    return dict(zip(leaves, gradients, strict=True))


def detached(value: Any) -> Any:
    """The same result without its autograd graph. Raises ``TypeError`` for a tensor that is not
    dense."""
    if isinstance(value, Tensor):
        if value.is_nested or value.layout != torch.strided:
            raise TypeError("the result is a sparse or nested tensor; expected a plain one")
        return value.detach()
    if isinstance(value, dict):
        return {key: detached(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [detached(part) for part in value]
    return value


def what_was_raised(error: BaseException) -> str:
    """Type and message of an exception, and the student's own line where it happened."""
    if isinstance(error, OutOfTime):
        return f"stopped: {error}. Is there a loop that never ends?"
    message = " ".join(str(error).split())[:200]
    text = f"{type(error).__name__}: {message}" if message else type(error).__name__
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if f.line and not f.filename.startswith(FOREIGN)]
    if own:
        cell = own[-1].filename.partition(", cell ")[2]  # of a submitted notebook
        text += f"\n{f'cell {cell}, ' if cell else ''}line {own[-1].lineno}: {own[-1].line}"
    if isinstance(error, NameError) and error.name:
        text += f"\n{error.name} is not defined inside the function: a typo, a missing import, or "
        text += "made outside of it?"
    return text


class OutOfTime(BaseException):
    """A case took too long. It is no Exception: `except Exception` in a loop cannot swallow it."""


@contextlib.contextmanager
def time_limit(seconds: float | None) -> Iterator[None]:
    """Raise OutOfTime after so many seconds of processor time, in the main thread of a system that
    has such alarms; elsewhere there is no limit."""
    possible = (
        hasattr(signal, "setitimer") and threading.current_thread() is threading.main_thread()
    )
    if seconds is None or not possible:
        yield
        return

    def stop(*_: object) -> None:
        raise OutOfTime(f"not done after {seconds:.2g} seconds")

    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


@contextlib.contextmanager
def quiet() -> Iterator[io.StringIO]:
    """Catch what the code prints; its warnings and the messages of libraries on file
    descriptor 2 are dropped, because some graders take any of them for a failure. Python's own
    debugger would wait at a prompt that nobody sees: `breakpoint()` raises."""
    printed, hook = io.StringIO(), sys.breakpointhook
    with (
        warnings.catch_warnings(),
        contextlib.redirect_stdout(printed),
        contextlib.redirect_stderr(printed),
        silent_descriptor(2),
    ):
        warnings.simplefilter("ignore")
        if hook is sys.__breakpointhook__:
            sys.breakpointhook = no_prompt
        try:
            yield printed
        finally:
            sys.breakpointhook = hook


def no_prompt(*_: object, **__: object) -> None:
    """Raises ``RuntimeError``: nobody could answer."""
    raise RuntimeError("breakpoint() in a check has no prompt: call your function yourself")


@contextlib.contextmanager
def silent_descriptor(number: int) -> Iterator[None]:
    """Nothing that is written to the descriptor appears."""
    sys.stderr.flush()
    try:
        copy = os.dup(number)
    except OSError:  # there is none: a process without a console
        yield
        return
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, number)
        yield
    finally:
        os.dup2(copy, number)
        os.close(copy)
        os.close(nowhere)


@contextlib.contextmanager
def kept_state() -> Iterator[None]:
    """Give back random states, default dtype and device, threads and gradient mode as they were."""
    random_state, torch_state = random.getstate(), torch.get_rng_state()
    device, dtype, threads, gradients = (
        torch.get_default_device(),
        torch.get_default_dtype(),
        torch.get_num_threads(),
        torch.is_grad_enabled(),
    )
    try:
        with torch.inference_mode(False), torch.autocast("cpu", enabled=False):
            usual_settings()
            yield
    finally:
        random.setstate(random_state)
        on_device(torch.device("cpu"))
        torch.set_rng_state(torch_state)
        on_device(device)
        torch.set_default_dtype(dtype)
        torch.set_num_threads(threads)
        torch.set_grad_enabled(gradients)


def put_back() -> list[str]:
    """Functions that comparing needs, where code has replaced them; they are what they were."""
    replaced = [key for key, was in COMPARING.items() if getattr(*key) is not was]
    for owner, name in replaced:
        setattr(owner, name, COMPARING[owner, name])
    return [f"{owner.__name__}.{name}" for owner, name in replaced]


def usual_settings() -> None:
    """What every case begins with."""
    on_device(torch.device("cpu"))
    torch.set_default_dtype(torch.float32)
    torch.set_num_threads(1)
    torch.set_grad_enabled(True)


def on_device(device: torch.device) -> None:
    """Set the default device, if it is another: once set, it makes every call of torch slower."""
    if torch.get_default_device() != device:
        torch.set_default_device(None if device.type == "cpu" else device)
