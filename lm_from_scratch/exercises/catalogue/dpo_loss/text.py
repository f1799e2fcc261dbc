# %% [markdown]
# # The loss of DPO
#
# For each prompt there are two answers, and somebody preferred one of them: it is the *chosen* one, the other is
# *rejected*. The reward of an answer says how much more probable the model $\pi$ finds it than a frozen copy of the
# model from before the training, the *reference*:
#
# $$r(y) = \beta \left( \log \pi(y) - \log \pi_\mathrm{ref}(y) \right), \qquad
# \mathcal{L} = -\log \sigma\left( r(y_\mathrm{chosen}) - r(y_\mathrm{rejected}) \right)$$
#
# $\sigma$ is the sigmoid. $\log \pi(y)$ is the logarithm of the probability of the *whole* answer; a model gives you
# the log-probability of each token.
#
# The first loss that a run prints is known before it starts, whatever the pairs, the model and $\beta$ are. **Work it
# out before you write code**: your function reports how far below it the loss has come.
#
# What holds for your function:
#
# - `log_probs` and `reference` have shape `(2, B, T)`, float32 or float64. They hold the log-probabilities of the
#   tokens of the chosen answers, `[0]`, and of the rejected ones, `[1]`. `mask` has the same shape and is bool: True
#   for the tokens of the answer. The prompt comes before them, padding after them, and the two answers of a pair may
#   differ in length.
# - Where `mask` is False, `log_probs` and `reference` may hold *anything*, even -inf or NaN. Each answer has at least
#   one token.
# - The result is a dict of three tensors without axes, in the dtype of `log_probs`:
#
#   | key | value |
#   |---|---|
#   | `loss` | the mean of $\mathcal{L}$ over the pairs |
#   | `gain` | how far the loss is below that of the first step, when the model still was the reference |
#   | `wins` | the share of the pairs whose chosen answer has the *higher* reward; equal is not higher |
#
# - `gain` and `wins` have no gradient. The gradient of `loss` reaches `log_probs`, and never `reference`, even if that
#   requires a gradient.
# - $\beta$ is 0.1 by default. A difference of rewards may be as large as 2000, on either side.
# - The inputs stay as they are.

# %%
import math

import torch
import torch.nn.functional as F
from torch import Tensor


# %%
def dpo_loss(
    log_probs: Tensor, reference: Tensor, mask: Tensor, beta: float = 0.1
) -> dict[str, Tensor]:
    """The loss of DPO for B pairs, from log-probabilities of tokens (2, B, T)."""
    ### BEGIN SOLUTION
    ratios = torch.where(mask, log_probs - reference.detach(), 0.0)
    chosen, rejected = beta * ratios.sum(2)
    margins = chosen - rejected
    loss = -F.logsigmoid(margins).mean()
    wins = (margins > 0).to(loss.dtype).mean()
    return {"loss": loss, "gain": math.log(2) - loss.detach(), "wins": wins}
    ### END SOLUTION


# %%
from lm_from_scratch.exercises import check

points = check("dpo_loss", dpo_loss)
### BEGIN HIDDEN TESTS
points = min(points, check("dpo_loss", dpo_loss, seed=7341))
### END HIDDEN TESTS
float(points)
