"""The commands of ``python -m lm_from_scratch``, one file each: no lesson is in them.

``train``, ``generate``, ``classify``, ``quantize``, ``convert``, ``describe`` and ``doctor`` each
say what they take and what they do with it; ``prepared`` makes what ``train`` trains, ``answers``
what it trains after pretraining. The commands of students and teachers are
:mod:`lm_from_scratch.exercises.commands`. ``options`` makes options from the fields of dataclasses:
name, type, default and meaning of a number are said there, where it is used, and so are its limits.
To add a number to a run: a field of its dataclass, and its name in ``train``; ``presets`` holds
sets of such numbers. To add a command: a file here, and a line in ``__main__``.
"""
