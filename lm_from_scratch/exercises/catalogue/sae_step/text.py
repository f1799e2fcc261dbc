# %% [markdown]
# # A step of a dictionary
#
# A sparse autoencoder learns a dictionary of a model's states: many directions, of which each state needs only a few.
# Write one step of its training, with the k largest features in place of a penalty.
#
# For states $x$, an encoder $W$ `(C, F)`, thresholds $a$ `(F,)`, directions $D$ `(F, C)` and a centre $b$ `(C,)`:
#
# $$f = \mathrm{top}_k\big(\mathrm{ReLU}((x - b)\, W + a)\big) \qquad \hat x = f D + b$$
#
# $$\mathrm{loss} = \frac{\sum_n \|\hat x_n - x_n\|^2}{\sum_n \|x_n - \bar x\|^2}$$
#
# Here $\bar x$ is the mean of the states of this batch, so a loss of 1 is that of always giving the mean back, and 0 is
# perfect.
#
# What holds for your function:
#
# - `x` has shape `(N, C)`, with N at least 2. `parts` is a dict of four tensors: `"encoder"`, `"threshold"`,
#   `"directions"`, `"centre"`. All are float32, or all float64. None requires a gradient.
# - $\mathrm{top}_k$ keeps the k largest numbers of each state, and makes all others of it 0. A feature that is active has
#   a value above 0, so a state may have fewer than k.
# - The step is plain gradient descent on all four: $p \leftarrow p - \mathrm{lr} \cdot \partial \mathrm{loss} / \partial
#   p$. Then each direction, a row of $D$, is divided by its length, so that no feature can hide its size in its
#   direction. The rows that you are given have length 1. In the loss, $D$ is as it was given.
# - The result is a dict of six tensors: `"features"` $f$ `(N, F)` and `"loss"` (no dimension) before the step, and the
#   four parts after it. None of them requires a gradient.
# - The arguments stay as they are.

# %%
import torch
from torch import Tensor


# %%
def dictionary_step(
    x: Tensor, parts: dict[str, Tensor], k: int, lr: float
) -> dict[str, Tensor]:
    """Features and loss of the states x (N, C), and the parts after a step."""
    ### BEGIN SOLUTION
    p = {name: part.clone().requires_grad_() for name, part in parts.items()}
    scores = (x - p["centre"]) @ p["encoder"] + p["threshold"]
    values, which = scores.relu().topk(k, dim=-1)
    features = torch.zeros_like(scores).scatter(-1, which, values)
    error = features @ p["directions"] + p["centre"] - x
    spread = x - x.mean(dim=0)
    loss = error.square().sum() / spread.square().sum()
    loss.backward()
    new = {name: part.detach() - lr * part.grad for name, part in p.items()}
    length = new["directions"].norm(dim=-1, keepdim=True)
    new["directions"] = new["directions"] / length
    return new | {"features": features.detach(), "loss": loss.detach()}
    ### END SOLUTION


# %%
from lm_from_scratch.exercises import check

points = check("sae_step", dictionary_step)
### BEGIN HIDDEN TESTS
points = min(points, check("sae_step", dictionary_step, seed=7341))
### END HIDDEN TESTS
float(points)
