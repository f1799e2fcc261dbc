# %% [markdown]
# # Attention with a sink
#
# The weights of a softmax sum to 1, so a head that finds nothing must still spend its weight. Models
# like gpt-oss give each head a *sink*: one learned score that takes part in the softmax and has no
# value. What it takes is simply missing:
#
# $$a_{ts} = \frac{e^{x_{ts}}}{e^{z_h} + \sum_r e^{x_{tr}}}, \qquad
# x_{ts} = \frac{q_t \cdot k_s}{\sqrt{D}}, \qquad y_t = \sum_s a_{ts} v_s$$
#
# What holds for your function:
#
# - `q` has shape `(B, H, T, D)`, `k` and `v` have `(B, Hkv, S, D)`. H is a multiple of Hkv: heads 0 to
#   H / Hkv - 1 share the first key head, and so on. `sinks` has shape `(H,)`: $z_h$ of each query head.
# - The sink is a score as it is: it is not divided by $\sqrt{D}$.
# - The T queries are the *last* T of the S tokens. Each sees its own token and all before it. With a
#   `window` W it sees its own token and the W - 1 before it. The sink is always there.
# - A sink may be minus infinity: then this is plain attention. Scores and sinks may be hundreds.
# - The result has shape `(B, H, T, D)`. In float64 nothing is rounded to float32; there is no half
#   precision.
# - The inputs stay as they are, and gradients reach all four.

# %%
import math

import torch
from torch import Tensor


# %%
def sink_attention(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, window: int | None = None
) -> Tensor:
    """Attention of the last T of S tokens, whose softmax has one score more: (B, H, T, D)."""
    ### BEGIN SOLUTION
    (B, H, T, D), (Hkv, S) = q.shape, k.shape[1:3]
    k, v = k.repeat_interleave(H // Hkv, 1), v.repeat_interleave(H // Hkv, 1)
    scores = q @ k.mT / math.sqrt(D)
    distance = torch.arange(S - T, S)[:, None] - torch.arange(S)
    hidden = distance < 0
    if window is not None:
        hidden = hidden | (distance >= window)
    scores = scores.masked_fill(hidden, -torch.inf)
    sink = sinks.view(H, 1, 1).expand(B, H, T, 1)
    return torch.cat([sink, scores], 3).softmax(3)[..., 1:] @ v
    ### END SOLUTION


# %%
from lm_from_scratch.exercises import check

points = check("sink_attention", sink_attention)
### BEGIN HIDDEN TESTS
points = min(points, check("sink_attention", sink_attention, seed=7341))
### END HIDDEN TESTS
float(points)
