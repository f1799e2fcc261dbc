"""One folder for each exercise.

* ``text.py``: what a student reads, the stub with its solution, the check cell
* ``checks.py``: reference, cases, hints, answers that are wrong and right
* ``proof.json``: that the checks tell them apart. An exercise without it is a draft

After a change to the checks, ``python tests/slow/exercise_proof/prove.py NAME --store`` proves them
again. The name of a folder is what students type and what their progress is kept under.
"""
