# %% [markdown]
# # Bug hunt: the checkpoint that came after the optimizer
#
# A language model is trained in float32, with its head tied to the embedding. It is built, an
# optimizer takes its parameters, and then a checkpoint in bfloat16 arrives. The model shall have the
# dtype of each tensor of the checkpoint from there on. Loading by default keeps the model's own
# dtype, so somebody wrote `assign=True`, and the logits were right at once.
#
# What users saw later:
#
# - The loss did not move. Five steps of training changed nothing, and there was no error.
# - A search by name found two weights that the optimizer did not hold, where there had been one.
# - Another model, in float64, loaded the same state dict in the usual way, without `assign`. It turned
#   bfloat16, and the two models shared their weights.
# - In a run that did train, the checkpoint in memory changed with every step.
#
# What holds for the fixed function:
#
# - `load_in_its_dtype(model, state)` gives each parameter of the built `model` the values and the
#   dtype of its tensor in `state`, which may differ from one tensor to the next. It returns nothing.
# - Whatever holds a parameter goes on holding it: an optimizer, a tied module, a list. A frozen
#   parameter stays frozen.
# - The model shares no memory with `state`. `state`, with all that it carries, stays as it was, so that
#   it can be loaded again by anybody.
# - `state` is what `state_dict()` of such a model returns, or a plain dict. A tied weight is in it
#   under both names, with equal values. The model has no buffers.
# - A missing or an unknown name in `state` raises a RuntimeError.
# - Global settings of torch are afterwards as they were before, whatever they were, and also if
#   it raised.

# %%
import torch
from torch import Tensor, nn


class Tied(nn.Module):
    """An embedding, a norm, and a head that shares the weight of the embedding."""

    def __init__(self, vocab: int = 7, width: int = 4):
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab, bias=False)
        self.head.weight = self.embed.weight


# %%
def load_in_its_dtype_as_found(
    model: nn.Module, state: dict[str, Tensor]
) -> None:
    """Load a checkpoint into a built model, which takes its dtypes."""
    model.load_state_dict(state, assign=True)


# %%
from lm_from_scratch.exercises import check

check("hunt_tied_weights", load_in_its_dtype_as_found)

# %% [markdown]
# Fix it here. The page on conversions has one way, and there are others.


# %%
def load_in_its_dtype(model: nn.Module, state: dict[str, Tensor]) -> None:
    """Load a checkpoint into a built model, which takes its dtypes."""
    ### BEGIN SOLUTION
    copies = {name: tensor.clone() for name, tensor in state.items()}
    flag = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        model.load_state_dict(copies, assign=True)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(flag)
    ### END SOLUTION


# %%
from lm_from_scratch.exercises import check

points = check("hunt_tied_weights", load_in_its_dtype)
### BEGIN HIDDEN TESTS
points = min(points, check("hunt_tied_weights", load_in_its_dtype, seed=7341))
### END HIDDEN TESTS
float(points)
