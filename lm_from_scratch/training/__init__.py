"""Training: the loss, the loop that yields every step, and memory traded for time.

Read ``loss``, then ``train``; ``classification_loss`` is for the heads of classifiers, and
``gradient_checkpointing`` trades time for memory. The loop knows nothing of files,
processes or options: what keeps a run on disk or shares it out is in ``runs``.
"""
