"""Name a misconception: the student's result equals that of an answer known to be wrong.

A fixed message for each test misleads, since many mistakes fail the same test. Here the result
itself is compared with the results of all planted wrong answers, on the very inputs that failed.
"""

from lm_from_scratch.exercises.compare import GRADIENT_TOLERANCE, compare, has_nan
from lm_from_scratch.exercises.exercise import Case, Exercise, Wrong
from lm_from_scratch.exercises.run import Outcome, tried
from lm_from_scratch.exercises.source import answer


def diagnose(
    exercise: Exercise, failed: dict[int, Outcome], wants: dict[int, Outcome], seed: int
) -> tuple[list[Wrong], list[int]]:
    """The wrong answer that explains most of the failed cases, and these cases; several answers, if
    nothing that was seen tells them apart.

    * ``failed``: what the student's function did, by the number of each case that it failed
    * ``wants``: what the reference did in those cases

    A wrong answer explains a case when it fails there too and does the same: values, gradients and
    changed arguments, within the tolerance of the case. One that explains less than half of them is
    not named: many mistakes look alike in a single case, as where scores saturate. Nor is one that
    gives something wrong in a case that the student passed: half a repair is not the code as found.
    Where two explain as many, that one is named which fails and passes more of the cases as the
    student did. A result with NaN is never named: all NaN look alike.
    """
    last = {n: o.again or o for n, o in failed.items()}  # the calls that failed
    usable = {n: failed[n] for n, o in last.items() if not o.fault and not has_nan(o.value)}
    best: list[Wrong] = []
    cases: list[int] = []
    least = 0
    for wrong in exercise.wrong if usable else ():
        numbers = explained(exercise, wrong, usable, wants, seed)
        if len(numbers) < max(len(cases), len(usable) / 2, 1):
            continue
        kinds = faults(exercise, wrong, wants, seed)
        if any(kind != "raised" for n, kind in kinds.items() if n not in failed):
            continue
        unlike = len(failed.keys() ^ kinds.keys())
        if len(numbers) > len(cases) or unlike < least:
            best, cases, least = [wrong], numbers, unlike
        elif numbers == cases and unlike == least:
            best.append(wrong)
    return best, cases


def faults(
    exercise: Exercise, wrong: Wrong, wants: dict[int, Outcome], seed: int
) -> dict[int, str]:
    """The kind of fault of a wrong answer, by the number of each case that it fails."""
    function = answer(exercise, wrong.answer)
    found = {n: tried(exercise, n, function, want, seed).wrong for n, want in wants.items()}
    return {n: fault.kind for n, fault in found.items() if fault}


def explained(
    exercise: Exercise,
    wrong: Wrong,
    failed: dict[int, Outcome],
    wants: dict[int, Outcome],
    seed: int,
) -> list[int]:
    """The numbers of the failed cases that a wrong answer explains."""
    function, numbers = answer(exercise, wrong.answer), []
    for number, got in failed.items():
        theirs = tried(exercise, number, function, wants[number], seed)
        if theirs.wrong and alike(exercise.cases[number], got, theirs):
            numbers.append(number)
    return numbers


def alike(case: Case, a: Outcome, b: Outcome) -> bool:
    """Whether two outcomes cannot be told apart, in either call."""
    if a.fault or b.fault or a.changed != b.changed or (a.again is None) != (b.again is None):
        return False
    if a.again and b.again and not alike(case, a.again, b.again):
        return False
    if compare(a.value, b.value, case.tolerance) or a.gradients.keys() != b.gradients.keys():
        return False
    for name, gradient in b.gradients.items():
        other = a.gradients[name]
        if (gradient is None) != (other is None):
            return False
        if gradient is not None and compare(other, gradient, GRADIENT_TOLERANCE):
            return False
    return True
