# Copy this file to begin a lesson: docs/writing.md says how. This line is not on the page.
r"""
Attention is an average
=======================

Which of the words before it does a word look at? Try it:

.. live:: look

What you see are weights: positive numbers that sum to 1.

One query
---------

A query is compared with every key, and the results become weights.
"""

# sphinx_gallery_needs = ["1_tokens"]
# sphinx_gallery_words = ["softmax", "attention weights"]

import torch

scores = torch.tensor([[1.0, 2.0, 0.5]])
weights = scores.softmax(-1)
weights

assert (weights > 0).all()

# %%
# **Predict first.** You add 7 to all scores. What happens to the weights?
#
# * The largest one grows.
# * Nothing.

(scores + 7).softmax(-1)

# %%
# Nothing: numerator and denominator gain the same factor, exp(7).
#
# Exercises
# ---------
#
# 1. *Easy.* Multiply all scores by 7 instead. Which weight grows, and why?
#
# Summary
# -------
#
# * A query is compared with every key.
# * Softmax makes weights of the scores.
# * Only differences between scores count.
