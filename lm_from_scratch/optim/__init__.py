"""Optimizers: how a gradient becomes a step.

Read ``adamw`` first: the formula, then the class that keeps its moments. ``galore_basis`` is about
directions in which a gradient is large, ``galore`` takes Adam's step in those alone, and
``in_backward`` takes the steps of either during the backward pass.

A new optimizer is a new file: a formula as a pure function, and a subclass of ``AdamW`` that
overrides ``update``. Whoever changes a formula changes it here; ``kernels`` repeats the formulas in
Triton, and ``runs.sharded`` says what happens to parameters of several processes.
"""
