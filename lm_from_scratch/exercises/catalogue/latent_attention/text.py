# %% [markdown]
# # Latent attention without a key
#
# A cache holds a latent $c_s$ of R numbers for each token, and a key $r_s$ of Dr features that is
# turned to its position and shared by all heads. Head h has two matrices, $W_K^h$ and $W_V^h$. Of
# its query the first Dn features, $q_t$, meet its own key, and the last Dr, $u_t$, the shared one:
#
# $$a_{ts} = \mathrm{softmax}_s\!\left(\frac{q_t \cdot W_K c_s + u_t \cdot r_s}{\sqrt{D_n + D_r}}\right),
# \qquad y_t = \sum_s a_{ts} \, W_V c_s$$
#
# Write it without making a key or a value of a head: multiply the query by $W_K^\top$ instead, and
# the mean of the latents by $W_V$.
#
# What holds for your function:
#
# - `q` has shape `(B, H, T, Dn + Dr)`, and its last Dr features are turned already. `latent` has
#   `(B, S, R)`, `shared` has `(B, S, Dr)`. The result has shape `(B, H, T, Dv)`.
# - `weight` has shape `(H * (Dn + Dv), R)`: for each head, one after the other, the Dn rows of its
#   $W_K$, then the Dv rows of its $W_V$. R, Dn, Dr and Dv may all differ.
# - The T queries are the *last* T of the S tokens. Each sees its own token and all before it.
# - No tensor that is made may have more than B · S · (R + Dr) numbers, where the scores have fewer.
#   A product that broadcasts the latents over the heads makes a copy for each head when B > 1.
# - Scores may be hundreds. In float64 nothing is rounded to float32; there is no half precision.
# - The inputs may have any order in memory. They stay as they are, and gradients reach all four.

# %%
import math

import torch
from torch import Tensor


# %%
def latent_attention(
    q: Tensor, latent: Tensor, shared: Tensor, weight: Tensor
) -> Tensor:
    """Attention of the last T of S tokens, whose keys and values are never made."""
    ### BEGIN SOLUTION
    B, H, T, D = q.shape
    S, R = latent.shape[1:]
    Dn = D - shared.shape[2]
    w = weight.reshape(H, -1, R)
    w_k, w_v = w[:, :Dn], w[:, Dn:]
    wide = torch.cat([q[..., :Dn] @ w_k, q[..., Dn:]], dim=-1)
    keys = torch.cat([latent, shared], dim=-1)
    scores = (wide.flatten(1, 2) @ keys.mT / math.sqrt(D)).view(B, H, T, S)
    future = torch.ones(T, S, dtype=torch.bool).triu(S - T + 1)
    weights = scores.masked_fill(future, -torch.inf).softmax(-1)
    mean = (weights.flatten(1, 2) @ latent).view(B, H, T, R)
    return mean @ w_v.mT
    ### END SOLUTION


# %%
from lm_from_scratch.exercises import check

points = check("latent_attention", latent_attention)
### BEGIN HIDDEN TESTS
points = min(points, check("latent_attention", latent_attention, seed=7341))
### END HIDDEN TESTS
float(points)
