# %% [markdown]
# # The gated delta rule
#
# A layer with a state keeps, for each head, one matrix $S$ of $D_k$ rows and $D_v$ columns, and no
# keys and values of earlier tokens. A token fades the state by its gate, asks what it says for the
# token's key, writes the *difference* to its value, and then reads:
#
# $$S \leftarrow e^{g_t} S, \qquad
# S \leftarrow S + \beta_t \, k_t \, (v_t - S^\top k_t)^\top, \qquad y_t = S^\top q_t$$
#
# The page writes $\alpha_t$ for $e^{g_t}$; models compute its logarithm, and you are given that.
#
# What holds for your function:
#
# - `q` and `k` have shape `(B, H, T, Dk)`, `v` has `(B, H, T, Dv)`. `g` and `beta` have `(B, H, T)`:
#   one number for each head and token. g is at most 0, and beta lies between 0 and 1. Dk and Dv may
#   differ. Keys and queries come as they should be used: nothing is normalised or divided here.
# - `state` is what earlier tokens have left, `(B, H, Dk, Dv)`.
# - The result is a pair: `y` with shape `(B, H, T, Dv)`, and the state after the last token.
# - So a text may come in pieces: with the state of the first piece, the second gives what the whole text
#   would give.
# - g may be -100 and less, and even minus infinity: then the state is empty before the token writes.
# - In float64 nothing is rounded to float32; there is no half precision.
# - The inputs stay as they are, the state too, and gradients reach all six.

# %%
import torch
from torch import Tensor


# %%
def delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """What each token reads, (B, H, T, Dv), and the state after all of them, (B, H, Dk, Dv)."""
    ### BEGIN SOLUTION
    decay = g.exp()[..., None, None]  # (B, H, T, 1, 1)
    rate = beta[..., None, None]
    outputs = []
    for t in range(q.shape[2]):
        key = k[:, :, t, :, None]  # (B, H, Dk, 1)
        state = decay[:, :, t] * state
        missing = v[:, :, t, None] - key.mT @ state  # (B, H, 1, Dv)
        state = state + key @ (rate[:, :, t] * missing)
        outputs.append(q[:, :, t, None] @ state)
    return torch.cat(outputs, 2), state
    ### END SOLUTION


# %%
from lm_from_scratch.exercises import check

points = check("delta_rule", delta_rule)
### BEGIN HIDDEN TESTS
points = min(points, check("delta_rule", delta_rule, seed=7341))
### END HIDDEN TESTS
float(points)
