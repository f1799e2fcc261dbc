"""One folder for each exercise.

* ``text.py``: what a student reads, the stub with its solution, the check cell
* ``checks.py``: reference, cases, hints, answers that are wrong and right
* ``proof.json``: that the checks tell them apart. An exercise without it is a draft
"""
