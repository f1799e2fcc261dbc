# Copy this file to begin a page in depth: docs/writing.md says how. This line is not on the page.
r"""
Attention in depth
==================

Which laws must the weights of `attention <1_attention.ipynb>`_ obey, and what goes wrong? A formula:
:math:`y_t = \sum_s a_{ts} v_s`.

One query
---------

The weights are positive and sum to 1.

.. math::

   a_{ts} = \operatorname{softmax}_s(q_t \cdot k_s / \sqrt{D})
"""

import torch

scores = torch.tensor([[1.0, 2.0, 0.5]])
weights = scores.softmax(-1)
weights

# %%
# The sum is 1, as the formula says.

torch.testing.assert_close(weights.sum(-1), torch.ones(1))

# %%
# Bug museum
# ----------
#
# The wrong axis
# ~~~~~~~~~~~~~~
#
# A softmax over the wrong axis turns the weight of every key into 1. The sum finds it.

wrong = scores.softmax(0)
assert wrong.sum() == 3

# %%
# Exercises
# ---------
#
# 1. *Easy.* Add 7 to all scores. What happens to the weights, and why?
#
# Sources
# -------
#
# * `Attention Is All You Need <https://arxiv.org/abs/1706.03762>`_

import lm_from_scratch

print("torch", torch.__version__)
print("lm_from_scratch", lm_from_scratch.__version__)
