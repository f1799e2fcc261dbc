"""The commands of ``python -m lm_from_scratch``: no lesson is in them.

What a command takes is a frozen dataclass, which imports no torch: those of ``train``, one for each
way to learn, are in ``train_options``, sets of their values in ``presets``, and those of all other
commands in ``options``. ``fields`` makes the command line from them. What a command does is in the
file of its name. ``train`` is a story of four: options, ``setups`` (a tokenizer, a model,
batches; ``answers`` after pretraining), the run, what is saved. ``loading`` and ``speed`` serve
several. The commands of students and teachers are in ``exercises.options``.

To add a number: a field of a dataclass, and its use. To add a command: a dataclass and a line of
``COMMANDS`` in ``options``, and a file with ``run``.
"""
