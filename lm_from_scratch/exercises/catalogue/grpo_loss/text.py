# %% [markdown]
# # The loss of GRPO
#
# For each of P prompts a model wrote G answers, a *group*, and each answer got a reward. GRPO compares an answer with
# its own group, and makes it more or less probable, token by token:
#
# $$A = \frac{R - \mathrm{mean}(R)}{\mathrm{std}(R) + 10^{-4}}, \qquad
# \rho = \frac{\pi}{\pi_\mathrm{old}}, \qquad
# \ell = -\min\left( \rho A, \; \mathrm{clip}(\rho, 1 - \epsilon, 1 + \epsilon) \, A \right)$$
#
# $A$ is the *advantage* of an answer with the reward R. (The page leaves it at $R - \mathrm{mean}(R)$ and needs no clip,
# as it takes one step for each batch.) $\pi$ is the probability of a token now, and $\pi_\mathrm{old}$
# the one with which it was sampled.
#
# To keep the model near a frozen reference, $k$ times an estimate of the distance from it is added to the loss of each
# token. The estimate is never negative:
#
# $$\frac{\pi_\mathrm{ref}}{\pi} - \log \frac{\pi_\mathrm{ref}}{\pi} - 1$$
#
# Much of a batch may be work for nothing. **Say which part**: your function also tells, without computing a gradient,
# which prompts would move the model at all if $k$ were 0. A prompt does so if at least one token of its answers still
# has a gradient. Think of two reasons why none may have one.
#
# What holds for your function:
#
# - `log_probs`, `old` and `reference` have shape `(P, G, T)`: the logarithms of $\pi$, $\pi_\mathrm{old}$ and
#   $\pi_\mathrm{ref}$, float32 or float64. `mask` has the same shape and is bool: True for the tokens of an answer,
#   which may be anywhere in a row. Where it is False, the three may hold anything, even -inf and NaN.
# - `rewards` has shape `(P, G)` and the dtype of `log_probs`; G is at least 2. The standard deviation is that of a
#   *sample*: torch's default. Answers of equal reward have an advantage of 0; a group that is all equal has rewards of
#   0, 0.5 or 1, so that its mean is exact.
# - An answer may have no token at all. It still counts in its group. At least one token of the batch counts.
# - `clip` is $\epsilon$, 0.2 by default. No ratio $\rho$ lies exactly on the border, and none is so large that it
#   overflows. `kl` is $k$, 0.04 by default.
# - The result is a dict. `loss` is the mean over *all* tokens of the batch that count, so a token of a long answer
#   weighs as much as one of a short answer. `teaches` is bool, `(P,)`.
# - The gradient of `loss` reaches `log_probs`, but not `old`, `reference` or `rewards`, even if they require a
#   gradient. The inputs stay as they are.

# %%
import torch
from torch import Tensor


# %%
def grpo_loss(
    log_probs: Tensor,
    old: Tensor,
    reference: Tensor,
    rewards: Tensor,
    mask: Tensor,
    clip: float = 0.2,
    kl: float = 0.04,
) -> dict[str, Tensor]:
    """The clipped loss of P groups of answers, and which of the groups teach."""
    ### BEGIN SOLUTION
    above = rewards.detach() - rewards.detach().mean(1, keepdim=True)
    A = (above / (above.std(1, keepdim=True) + 1e-4))[..., None]
    ratio = torch.where(mask, log_probs - old.detach(), 0.0).exp()
    losses = -torch.minimum(ratio * A, ratio.clamp(1 - clip, 1 + clip) * A)
    gain = torch.where(mask, log_probs - reference.detach(), 0.0)
    losses = losses + kl * ((-gain).exp() + gain - 1)
    loss = torch.where(mask, losses, 0.0).sum() / mask.sum()
    free = torch.where(A > 0, ratio < 1 + clip, ratio > 1 - clip)
    return {"loss": loss, "teaches": (free & mask & (A != 0)).any(2).any(1)}
    ### END SOLUTION


# %%
from lm_from_scratch.exercises import check

points = check("grpo_loss", grpo_loss)
### BEGIN HIDDEN TESTS
points = min(points, check("grpo_loss", grpo_loss, seed=7341))
### END HIDDEN TESTS
float(points)
