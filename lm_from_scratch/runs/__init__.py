"""Runs that last: steps that are kept on disk and resumed, in one process or in several.

If you are here for the models, you may skip this room. Read ``config`` first: the numbers of a run
are the fields of ``TrainConfig``, from which ``train`` makes the run. ``checkpoints`` puts a folder
under the steps of a run. ``folder`` keeps other runs out of it and writes its log, ``distributed``
shares the steps out among the processes that torchrun started, and ``sharded`` holds the optimizers
for weights that are cut into shares.

None of them computes a step: the loop is in :mod:`lm_from_scratch.training.train`, which knows none
of them. A new way to share out a run answers the questions of
:mod:`lm_from_scratch.training.processes`; what a checkpoint holds is changed in
:mod:`lm_from_scratch.checkpoint.state`.
"""
