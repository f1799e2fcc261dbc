"""Runs that last: steps that are saved and resumed, in one process or in several.

:mod:`~lm_from_scratch.runs.saved` puts a folder under the steps of a training loop, and
:mod:`~lm_from_scratch.runs.distributed` shares them out. Neither computes a step: who changes the
loop in :mod:`lm_from_scratch.training.train` need not touch them.
"""
