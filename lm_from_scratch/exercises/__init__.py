"""Exercises with checks that say what is wrong: ``check("rms_norm", rms_norm)``.

The exercises are in ``catalogue``, a folder each; everything else here serves them. Read
``exercise`` (what one consists of), ``inputs`` (what its cases are made of) and ``report`` (a
check, and its words), then as you need them:

* ``run``, ``compare``, ``diagnose``: run a case, find the first difference, name the misconception
* ``source``, ``submission``: the text of an exercise; what is taken out of a student's file
* ``parts``, ``loops``, ``playing``: where each exercise has its place in a model, what such a model
  does, and your code in a trained one
* ``card``, ``progress``, ``launch``: what the course says of an exercise, what was solved, Triton
  kernels of students
* ``options``, ``commands``, ``checking``: what the commands take, and what they do
* ``child``, ``seal``: a file in a process of its own, and that process shut in
* ``grade``, ``marks``, ``book``, ``feedback``, ``grade_command``: a folder of files, what they are
  worth, the tables of a class, a page for each student, the command
* ``play_class``, ``play_command``: a model with the answers of each student, the command

To add an exercise, add a folder to ``catalogue``; no file here changes.
"""

from collections.abc import Callable
from typing import Any


def check(name: str, function: Callable[..., Any], seed: int = 0, case: int | None = None) -> float:
    """Check your answer to an exercise, print what is wrong, and return the points.

    * ``name``: of the exercise: ``python -m lm_from_scratch list`` shows all of them
    * ``function``: what you wrote
    * ``seed``: other numbers in the same cases
    * ``case``: the number of one case, to repeat it alone; what your code prints is then shown

    The points are a finite number from 0 to the exercise's maximum. A result that is better than
    those before is kept (`progress.py`). Nothing here stops a loop that never ends: interrupt it as
    any other cell.
    """
    # what a check needs brings torch: a list of the exercises does without
    from lm_from_scratch.exercises import progress
    from lm_from_scratch.exercises.exercise import exercise
    from lm_from_scratch.exercises.report import examine

    wanted = exercise(name)
    report = examine(wanted, function, seed, case)
    print(report.text())
    own = getattr(function, "__name__", "") == wanted.function  # not the code as found in a hunt
    if case is None and own:
        trouble = progress.keep(name, report.points, report.passed, seed)
        if trouble:
            print(f"This is not kept: {trouble}.")
    return report.points


def play(name: str, function: Callable[..., Any]) -> bool:
    """Let a model write, or learn, with your answer to an exercise, and print what comes of it.

    * ``name``: of the exercise
    * ``function``: what you wrote

    Returns whether the model does the same with it as with the package's own function. Raises
    ``ValueError``, with the exercises that have one, if this has no place in a model.
    """
    from lm_from_scratch.exercises import playing  # the models, which a check does without

    return playing.play(name, function)
