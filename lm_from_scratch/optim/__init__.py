"""Optimizers: how a gradient becomes a step.

Read ``adamw`` first: the formula, then the class that keeps its moments. ``galore_basis`` finds the
directions in which a gradient is large, ``galore`` takes Adam's step in those alone. ``muon`` gives
the directions of a matrix steps of one size. ``eight_bit`` keeps the moments of either in one byte
a number, and ``in_backward`` takes the steps of either during the backward pass.

``config`` has the numbers that define one, and ``choose`` makes it of them for a run.

A new optimizer is a new file: a formula as a pure function, and a subclass of ``AdamW`` that
overrides ``update``. If you change a formula here, change it in ``kernels`` too, which repeats it
in Triton; ``runs.sharded`` says what happens to parameters of several processes.
"""
