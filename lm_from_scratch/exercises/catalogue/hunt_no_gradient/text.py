# %% [markdown]
# # Bug hunt: a loss without a gradient
#
# A small trainer learns from rewards. The model writes answers, a program marks them, and a step makes the better ones
# more probable. While the model writes, the log-probability of each sampled token is noted: these numbers are needed
# later, and noting them saves a pass.
#
# The first run stopped at `loss.backward()`:
#
#     RuntimeError: element 0 of tensors does not require grad and does not have a grad_fn
#
# Somebody made the message go away; the last line of the code shows how. Since then the run does not stop any more. It
# reports a loss of 0.0000 in every step, and looks healthy: in the first step on new answers such a loss *should* be
# near 0, because the advantages of a group have a mean of 0. But the reward has not changed for a day.
#
# Find what is wrong, and write the function again. What holds for it:
#
# - `model` is a module: token ids `(B, T + 1)` in, logits `(B, T + 1, V)` out. Its weights have moved since the answers
#   were written, unless this is the first step on them. The function `log_probs_of` below is correct.
# - `ids` is int64, `(B, T + 1)`. `noted` is `(B, T)`: the log-probabilities that the model gave to `ids[:, 1:]` when
#   it wrote them. `mask` is bool, `(B, T)`: True for the tokens that the model wrote, at least one in the batch.
#   Elsewhere `noted` may hold anything, even NaN or infinity.
# - `advantages` is `(B,)`. `clip` is 0.2 by default.
# - The result is the mean over the tokens that the model wrote of $-\min(\rho A, \mathrm{clip}(\rho, 1 - \epsilon, 1 +
#   \epsilon) A)$, where $\rho$ is the probability of a token now, divided by the one with which it was sampled.
# - After `backward()` of the result all weights of the model have their gradients. Nothing else gets one, even if
#   `noted` or `advantages` require a gradient, or if `noted` is still part of the graph of the pass that wrote it.
# - The function itself calls no `backward`, and leaves existing gradients as they are. It leaves the model in the
#   mode (`train` or `eval`) in which it was.

# %%
import torch
from torch import Tensor, nn


def log_probs_of(model: nn.Module, ids: Tensor) -> Tensor:
    """The log-probability of each token after the first: (B, T)."""
    log_p = model(ids)[:, :-1].log_softmax(-1)
    return log_p.gather(-1, ids[:, 1:, None])[..., 0]


# %%
def step_loss_as_found(
    model: nn.Module,
    ids: Tensor,
    noted: Tensor,
    advantages: Tensor,
    mask: Tensor,
    clip: float = 0.2,
) -> Tensor:
    """The loss of one step on answers that the model wrote."""
    now = noted  # the model has said them already: no second pass
    old = now.detach()
    ratio = (now - old).masked_fill(~mask, 0.0).exp()
    A = advantages[:, None]
    losses = -torch.minimum(ratio * A, ratio.clamp(1 - clip, 1 + clip) * A)
    loss = losses.masked_fill(~mask, 0.0).sum() / mask.sum()
    return loss.requires_grad_()


# %%
from lm_from_scratch.exercises import check

check("hunt_no_gradient", step_loss_as_found)

# %% [markdown]
# Before you write: which number would have shown in the very first step that nothing is learned? It is not the loss.
# There are two fixes that look right here, and one of them is right in the first step only.


# %%
def step_loss(
    model: nn.Module,
    ids: Tensor,
    noted: Tensor,
    advantages: Tensor,
    mask: Tensor,
    clip: float = 0.2,
) -> Tensor:
    """The loss of one step on answers that the model wrote."""
    ### BEGIN SOLUTION
    now = log_probs_of(model, ids)
    ratio = torch.where(mask, now - noted.detach(), 0.0).exp()
    A = advantages.detach()[:, None]
    losses = -torch.minimum(ratio * A, ratio.clamp(1 - clip, 1 + clip) * A)
    return torch.where(mask, losses, 0.0).sum() / mask.sum()
    ### END SOLUTION


# %%
from lm_from_scratch.exercises import check

points = check("hunt_no_gradient", step_loss)
### BEGIN HIDDEN TESTS
points = min(points, check("hunt_no_gradient", step_loss, seed=7341))
### END HIDDEN TESTS
float(points)
