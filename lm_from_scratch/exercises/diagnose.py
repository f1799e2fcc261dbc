"""Name a misconception: the student's result equals that of an answer known to be wrong.

A fixed message for each test misleads, since many mistakes fail the same test. Here the result
itself is compared with the results of all planted wrong answers, on the very inputs that failed.
"""

from lm_from_scratch.exercises.compare import GRADIENT_TOLERANCE, compare, has_nan
from lm_from_scratch.exercises.exercise import Case, Exercise, Wrong
from lm_from_scratch.exercises.run import Outcome, judge, outcome
from lm_from_scratch.exercises.source import answer


def diagnose(
    exercise: Exercise, failed: dict[int, Outcome], wants: dict[int, Outcome], seed: int
) -> Wrong | None:
    """The wrong answer that explains most of the failed cases, or None.

    failed  what the student's function did, by the number of each case that it failed
    wants   what the reference did in those cases

    A wrong answer explains a case when it fails there too and does the same: values, gradients and
    changed arguments, within the tolerance of the case. Where two explain as many, the first in the
    exercise's own order is named. A result with NaN is never named: all NaN look alike.
    """
    usable = {n: o for n, o in failed.items() if not o.fault and not has_nan(o.value)}
    best, most = None, 0
    for wrong in exercise.wrong if usable else ():
        function = answer(exercise, wrong.answer)
        explained = 0
        for number, got in usable.items():
            theirs = outcome(exercise, number, function, seed)
            case = exercise.cases[number]
            if judge(case, theirs, wants[number]) and alike(case, got, theirs):
                explained += 1
        if explained > most:
            best, most = wrong, explained
    return best


def alike(case: Case, a: Outcome, b: Outcome) -> bool:
    """Whether two outcomes cannot be told apart."""
    if a.fault or b.fault or a.changed != b.changed:
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
