"""Runs that last: steps that are kept on disk and resumed, in one process or in several.

Services that a reader may skip. ``saved`` puts a folder under the steps of a training loop,
``folder`` keeps others out of it and writes its log, ``distributed`` shares the steps out among the
processes that torchrun started, ``sharded`` holds the optimizers for weights that are cut into
shares. None of them computes a step: the loop is in :mod:`lm_from_scratch.training.train`, which
knows none of them.
"""
