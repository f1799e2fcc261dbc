# %% [markdown]
# # Cross-entropy of next tokens
#
# A language model gives every token of the vocabulary a logit $z_j$. The loss of one token is the negative
# logarithm of the probability that the model gave to the token $y$ which really came next:
#
# $$\mathcal{L} = -\log \frac{e^{z_y}}{\sum_j e^{z_j}}$$
#
# The loss of a batch is the mean of $\mathcal{L}$ over all tokens that have a target. The last token of a row and all
# padding have none: their target is -100, and they do not count. Write this loss without `F.cross_entropy` and
# `F.nll_loss`.
#
# What holds for your function:
#
# - `logits` has shape `(..., V)`, with one axis or more before the last. `targets` has the same shape without the last
#   axis, and dtype int64. Both may have any order in memory. Any other shape of `targets` is refused with a
#   `ValueError`, also one with the same number of elements.
# - `targets` holds at each place the token that follows: it is shifted already. Each target is -100 or a token from 0
#   to V - 1. V may be larger than 100.
# - The result is a tensor without axes: the mean over all targets of the batch that are not -100, in nats.
# - If all targets are -100, the result is 0, not NaN, and so is its gradient.
# - Logits may be 1000 or higher at one token and low at the next, and the probability of a target may be as small as
#   $e^{-200}$. A logit of minus infinity bans a token; no target is banned, but any token may be banned where the
#   target is -100.
# - For float16 and bfloat16 the loss is computed in float32, and is float32. float64 is computed in float64.
# - `logits` and `targets` stay as they are, and gradients reach `logits`.

# %%
import torch
from torch import Tensor

IGNORE = -100


# %%
def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy of logits (..., V) over the targets (...) that are not -100."""
    ### BEGIN SOLUTION
    if logits.shape[:-1] != targets.shape:
        raise ValueError(f"logits {logits.shape} and targets {targets.shape}")
    counts = targets != IGNORE
    rows, wanted = logits[counts], targets[counts]  # (N, V) and (N,)
    if rows.dtype != torch.float64:
        rows = rows.float()
    chosen = rows.gather(1, wanted[:, None])[:, 0]
    losses = rows.logsumexp(1) - chosen
    return losses.sum() / counts.sum().clamp(min=1)
    ### END SOLUTION


# %%
from lm_from_scratch.exercises import check

points = check("cross_entropy", cross_entropy)
### BEGIN HIDDEN TESTS
points = min(points, check("cross_entropy", cross_entropy, seed=7341))
### END HIDDEN TESTS
float(points)
