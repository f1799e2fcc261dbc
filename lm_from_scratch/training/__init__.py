"""Training: a loss, a step, and a loop that yields its steps.

Nothing here asks about files, processes or options: those are in :mod:`lm_from_scratch.runs`.
"""
