"""Checkpoints: models in the published format, and the state of a training run.

Read :mod:`~lm_from_scratch.checkpoint.weights` first: it reads and writes a model's folder, and is
all that most callers need. :mod:`~lm_from_scratch.checkpoint.configs` translates ``config.json``,
:mod:`~lm_from_scratch.checkpoint.architectures` says which model it is,
:mod:`~lm_from_scratch.checkpoint.tensors` reads and writes the files of weights,
:mod:`~lm_from_scratch.checkpoint.names` turns their names into those of our models,
:mod:`~lm_from_scratch.checkpoint.published` is what else a folder says,
:mod:`~lm_from_scratch.checkpoint.ideas` says of any ``config.json`` which ideas its model uses,
:mod:`~lm_from_scratch.checkpoint.cache_sizes` what a text costs it in memory,
:mod:`~lm_from_scratch.checkpoint.state` keeps a training run so that it can be resumed, and
:mod:`~lm_from_scratch.checkpoint.folders` writes all of it whole or not at all.

A new architecture needs its row in ``dialects`` (``layer_kinds`` reads which of its layers do what;
``deepseek_v4`` and ``gemma4`` are what is odd about one config) and, if its files are laid out
differently, a change in ``rename`` of ``names`` and ``stored`` of ``weights`` (``experts`` stacks
those of a layer); the other files work for any model.
"""
