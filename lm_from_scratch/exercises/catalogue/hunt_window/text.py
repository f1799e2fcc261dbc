# %% [markdown]
# # Bug hunt: the window that slid elsewhere
#
# An early Qwen2 has four layers, a window of 4 keys, and `max_window_layers` = 2. With twelve
# tokens its logits are off by 6.7 from those of today's library. With four tokens they are equal.
# The keys that the last query of each layer sees were counted: the library has 12, 12, 4, 4, and
# this model 5, 5, 12, 12. One repair alone does not make the logits right, so a comparison of
# logits does not tell a good repair from a bad one.
#
# Find what is wrong and write the function again. What holds for it:
#
# - `n_layers`, `max_window_layers`, `T` and `S` are numbers. `sliding_window` is a number of at
#   least 1, or `None` if the switch is off.
# - The result is a `bool` tensor `(n_layers, T, S)`, True where the query of a layer sees the key.
#   The T queries are the last of the S tokens, and none sees the future.
# - Layers with index `max_window_layers` *and above* slide, if `use_sliding_window` is on. All
#   others see everything before them. With `max_window_layers` = 0 all layers slide, and with
#   `n_layers` none does.
# - A layer that slides sees `sliding_window` keys, the query's own included.
# - `flash_rule` below is right: it shows what the kernel of FlashAttention was given.

# %%
import torch


def flash_rule(T: int, S: int, left: int | None = None) -> torch.Tensor:
    """The kernel's mask: the query's own key, and `left` keys before it, or all if it is None."""
    query = torch.arange(S - T, S)[:, None]
    key = torch.arange(S)
    seen = key <= query
    return seen if left is None else seen & (key >= query - left)


# %%
def layer_masks_as_found(
    n_layers: int,
    sliding_window: int | None,
    max_window_layers: int,
    use_sliding_window: bool,
    T: int,
    S: int,
) -> torch.Tensor:
    """What the queries of each layer see: (n_layers, T, S)."""
    masks = []
    for layer in range(n_layers):
        left = None
        if (
            use_sliding_window
            and layer < max_window_layers
            and sliding_window < S
        ):
            left = sliding_window
        masks.append(flash_rule(T, S, left))
    return torch.stack(masks)


# %%
from lm_from_scratch.exercises import check

check("hunt_window", layer_masks_as_found)

# %% [markdown]
# Now yours.


# %%
def layer_masks(
    n_layers: int,
    sliding_window: int | None,
    max_window_layers: int,
    use_sliding_window: bool,
    T: int,
    S: int,
) -> torch.Tensor:
    """What the queries of each layer see: (n_layers, T, S)."""
    ### BEGIN SOLUTION
    masks = []
    for layer in range(n_layers):
        slides = use_sliding_window and layer >= max_window_layers
        left = sliding_window - 1 if slides else None
        masks.append(flash_rule(T, S, left))
    return torch.stack(masks)
    ### END SOLUTION


# %%
from lm_from_scratch.exercises import check

points = check("hunt_window", layer_masks)
### BEGIN HIDDEN TESTS
points = min(points, check("hunt_window", layer_masks, seed=7341))
### END HIDDEN TESTS
float(points)
