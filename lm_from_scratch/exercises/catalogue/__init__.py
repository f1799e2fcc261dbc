"""One folder for each exercise.

* ``text.py``: what a student reads, the stub with its solution, the check cell
* ``checks.py``: reference, cases, hints, wrong answers and the case that rejects each
* ``part.py``: where a model runs the answer, if it can

After a change to the checks, ``pytest tests/exercises -k NAME`` says whether they still tell right
from wrong. The name of a folder is what students type and what their progress is kept under.
"""
