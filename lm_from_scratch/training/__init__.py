"""Training: the loss, the loop that yields every step, and memory traded for time.

Read ``autograd`` (what ``backward`` does, without torch), then ``loss``, ``objective`` (a model and
its loss) and ``train``. ``processes`` is what the loop asks of the processes that it runs in;
``dropout`` is for a model whose architecture has none, ``classification_loss`` for the heads of
classifiers, and ``gradient_checkpointing`` saves memory for more computation. What comes after
pretraining begins with ``log_probs``: then ``preference``, ``policy_gradient`` (rewards) and
``distillation``; ``pairs`` and ``rollouts`` are runs of the first two. ``in_backward`` is another
way to take a step. The loop knows nothing of files, other processes or options: what keeps a run on
disk or shares it out is in ``runs``.
"""
