# %% [markdown]
# # Attention over packed sequences
#
# Padding costs what tokens cost. So the sequences of a batch can be laid end to end, N tokens in one row, and a short
# tensor of *cumulative lengths* says where each begins. Lengths of 3, 5 and 2 become
#
# $$\text{cu\_seq} = (0,\ 3,\ 8,\ 10)$$
#
# and sequence $i$ is the slice from `cu_seq[i]` to `cu_seq[i + 1]`. Attention stays within a sequence, and is causal
# there. When the earlier tokens of a sequence come from a cache, it has fewer queries than keys; its queries are then
# its *last* tokens.
#
# What holds for your function:
#
# - `q` has shape `(N, H, D)`: tokens, heads, features. `k` and `v` have shape `(M, Hkv, D)`. The result has the shape
#   and dtype of `q`. Inputs may have any order in memory.
# - `cu_seq_q` holds the bounds of the queries and ends with N, `cu_seq_k` those of the keys and values and ends with M.
#   Both begin with 0, have one dimension and dtype int32 or int64.
# - With T queries and S keys in a sequence, the queries are the last T of its S tokens: the first of them sees
#   S - T + 1 keys, the last sees all of them. Every token sees itself.
# - Scores are divided by $\sqrt{D}$. Hkv divides H: the first H / Hkv query heads share key head 0, the next share key
#   head 1, and so on.
# - A sequence may have one token or none, or keys and no query. There may be no sequence at all: `cu_seq` is then
#   `[0]`.
# - Scores may be several hundred, or all of them about -20000: softmax must hold there, and what is hidden must stay
#   hidden. float64 is computed in float64.
# - A `ValueError` refuses bounds that do not end with N and M, two tensors of bounds for another number of sequences,
#   and a sequence with more queries than keys.
# - `q`, `k` and `v` stay as they are, and gradients reach all three.
#
# One loop over the sequences is fine. `torch.nn.functional.scaled_dot_product_attention` is allowed, but mind where its
# `is_causal` aligns the mask.

# %%
from itertools import pairwise

import torch
from torch import Tensor


# %%
def packed_attention(
    q: Tensor, k: Tensor, v: Tensor, cu_seq_q: Tensor, cu_seq_k: Tensor
) -> Tensor:
    """Causal attention (N, H, D) within each of the packed sequences."""
    ### BEGIN SOLUTION
    bounds_q, bounds_k = cu_seq_q.tolist(), cu_seq_k.tolist()
    if bounds_q[-1] != len(q) or bounds_k[-1] != len(k):
        raise ValueError("the bounds must end with the number of tokens")
    H, D = q.shape[1:]
    k = k.repeat_interleave(H // k.shape[1], dim=1)  # (M, H, D)
    v = v.repeat_interleave(H // v.shape[1], dim=1)
    results = [q[:0]]
    for (a, b), (c, d) in zip(
        pairwise(bounds_q), pairwise(bounds_k), strict=True
    ):
        T, S = b - a, d - c
        if T > S:
            raise ValueError(f"{T} queries, but only {S} keys")
        scores = torch.einsum("thd,shd->hts", q[a:b], k[c:d]) / D**0.5
        visible = torch.ones(T, S, dtype=torch.bool).tril(S - T)
        weights = scores.masked_fill(~visible, -torch.inf).softmax(-1)
        results.append(torch.einsum("hts,shd->thd", weights, v[c:d]))
    return torch.cat(results)
    ### END SOLUTION


# %%
from lm_from_scratch.exercises import check

points = check("packed_attention", packed_attention)
### BEGIN HIDDEN TESTS
points = min(points, check("packed_attention", packed_attention, seed=7341))
### END HIDDEN TESTS
float(points)
