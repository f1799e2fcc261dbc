# %% [markdown]
# # YaRN
#
# A model read texts of up to $L$ tokens in training. With RoPE, pair $i$ of the $D/2$ pairs of a
# head turns by $\omega_i = \theta^{-2i/D}$ a token, so it makes $L \omega_i / 2\pi$ turns within
# $L$ tokens. Fast pairs have shown every angle. Slow pairs have not completed a turn, and at longer
# distances they reach angles that training never showed. YaRN lets the fast pairs be, divides the
# speed of the slow ones by $s$, and has a ramp between the two.
#
# Let $i(r)$ be the pair that makes $r$ turns within $L$ tokens: solve $L \omega_i / 2\pi = r$
# for $i$, which need not be whole. Then the share of slowing of pair $i$ is
#
# $$\gamma_i = \frac{i - \text{first}}{\text{last} - \text{first}} \text{, limited to 0 and 1},
# \qquad \text{first} = \lfloor i(\beta_\text{fast}) \rfloor, \qquad
# \text{last} = \lceil i(\beta_\text{slow}) \rceil$$
#
# and its new speed is $(1 - \gamma_i)\,\omega_i + \gamma_i\,\omega_i / s$. (The page on longer contexts
# writes $\kappa_i$ for the share that is kept, $1 - \gamma_i$.) Besides, cosines and sines are
# multiplied by $0.1 \ln s + 1$, which makes attention a little sharper.
#
# What holds for your function:
#
# - `head_dim` is $D$ (even), `theta` is $\theta$, `factor` is $s$ (1 or more), `original_length` is
#   $L$. `beta_fast` is 32 and `beta_slow` is 1 if the caller does not give them.
# - The result is two things: the new speeds, float32 of shape `(D/2,)`, right to five digits, and
#   the number that cosines and sines are multiplied by.
# - `first` is at least 0, also where $i(\beta_\text{fast})$ is below 0. `last` may lie beyond the
#   last pair $D/2 - 1$, and is not cut off there. (transformers cuts it off at $D - 1$, which no
#   case here reaches.)
# - Where `first` and `last` are equal, the ramp is a step: that pair keeps its speed, and all after
#   it are slowed.

# %%
import math

import torch
from torch import Tensor


# %%
def yarn(
    head_dim: int,
    theta: float,
    factor: float,
    original_length: int,
    beta_fast: float = 32.0,
    beta_slow: float = 1.0,
) -> tuple[Tensor, float]:
    """The speeds (D/2,) of YaRN, and what cosines and sines are multiplied by."""
    ### BEGIN SOLUTION
    speeds = 1.0 / theta ** (torch.arange(0, head_dim, 2) / head_dim)
    i = torch.arange(len(speeds))

    def pair(turns):
        ratio = original_length / (2 * math.pi * turns)
        return head_dim / 2 * math.log(ratio, theta)

    first = max(math.floor(pair(beta_fast)), 0)
    last = math.ceil(pair(beta_slow))
    slowed = ((i - first) / max(last - first, 1)).clamp(0, 1)
    speeds = (1 - slowed) * speeds + slowed * speeds / factor
    return speeds, 0.1 * math.log(factor) + 1.0
    ### END SOLUTION


# %%
from lm_from_scratch.exercises import check

points = check("yarn", yarn)
### BEGIN HIDDEN TESTS
points = min(points, check("yarn", yarn, seed=7341))
### END HIDDEN TESTS
float(points)
