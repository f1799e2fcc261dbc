# %% [markdown]
# # Bug hunt: a loss too good to be true
#
# A small trainer made a row of fixed length from each text and trained a GPT-2 on these rows. After ten epochs it
# reported a loss of 5.62. A model that knows nothing has 10.82, so this looked like success.
#
# Then somebody let the model write. The greedy output was ten padding tokens. On the real characters of the training
# texts the loss was 10.36, hardly better than nothing. Another user printed the mask of the text *hi* in a row of 32
# tokens: its sum was 32.
#
# Below is the function that made one row. Find what is wrong and fix it.
#
# What holds for your function:
#
# - `ids` is a list of at least one token id, `length` the length of the row. `ids` stays as it is.
# - The result is a dict of three int64 tensors of shape `(length,)`, with the keys `input_ids`, `attention_mask` and
#   `labels`.
# - `input_ids` holds the first `length` tokens of the text. A shorter text is filled up on the right with `PAD`.
# - `attention_mask` is 1 for a token of the text, and 0 for what was filled up.
# - `labels` are the tokens of the text themselves: the loss below shifts them. A label of -100 does not count.
# - The text may contain the token `PAD` itself, anywhere: the program's tokenizer gave this number to real characters
#   too. There it is a token like any other.

# %%
import torch
import torch.nn.functional as F
from torch import Tensor

PAD, IGNORE = 0, -100


def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
    """The loss of the logits (length, V) of one row: each token predicts the next."""
    return F.cross_entropy(logits[:-1], labels[1:], ignore_index=IGNORE)


# %%
def padded_example_as_found(ids: list[int], length: int) -> dict[str, Tensor]:
    """One row of a fixed length: ids, mask and labels."""
    ids = ids[:length]
    ids = ids + [PAD] * (length - len(ids))
    input_ids = torch.tensor(ids)
    attention_mask = torch.tensor([1] * len(ids))
    labels = input_ids.clone()
    return {
        "input_ids": input_ids,
        "attention_mask": attention_mask,
        "labels": labels,
    }


# %%
from lm_from_scratch.exercises import check

check("hunt_padded_targets", padded_example_as_found)

# %% [markdown]
# Write the fixed function here. What the code already does right must stay right.


# %%
def padded_example(ids: list[int], length: int) -> dict[str, Tensor]:
    """One row of a fixed length: ids, mask and labels."""
    ### BEGIN SOLUTION
    ids = ids[:length]
    padding = length - len(ids)
    return {
        "input_ids": torch.tensor(ids + [PAD] * padding),
        "attention_mask": torch.tensor([1] * len(ids) + [0] * padding),
        "labels": torch.tensor(ids + [IGNORE] * padding),
    }
    ### END SOLUTION


# %%
from lm_from_scratch.exercises import check

points = check("hunt_padded_targets", padded_example)
### BEGIN HIDDEN TESTS
points = min(points, check("hunt_padded_targets", padded_example, seed=7341))
### END HIDDEN TESTS
float(points)
