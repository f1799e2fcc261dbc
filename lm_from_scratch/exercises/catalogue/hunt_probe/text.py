# %% [markdown]
# # Bug hunt: a probe that is always right
#
# A model reads stories. Here and there a story asks where something is, and the next word is the answer. Somebody wants to
# know whether the model has the answer *before* it is said: a linear probe shall read it off the state at the question.
#
# The function below collects the states and the answers. A probe that was fitted on one half of them is right in 100 % of
# the other half. The stories of both halves are different, mean and scale are those of the first half, nothing is fitted
# twice: all that was looked at, and is in order. But the probe is as good in front of the first block as behind the last
# one. It is as good in a model whose weights are random. And it is as good on stories that never say where anything is.
#
# One line of the function is wrong. Find it, and write the function again. What holds for it:
#
# - `model` is a function from token ids `(B, T)`, int64, to states `(B, T, C)`. The state at a place depends on the tokens
#   up to that place and on no later one; its own token is among them.
# - `stories` is a list of at least one story, and a story is a list of token ids. `ASK` is the token that ends a question.
#   The token after it is the answer; no story ends with `ASK`. A story may ask any number of times, or never; in all there
#   is at least one question. Token `PAD` appears in no story.
# - Stories are filled up with `PAD` on the right where the model reads several at once. It makes no difference to the
#   states in front of it.
# - The result is a pair: for each question the state at which the model is about to say the answer, and has not yet read
#   it, `(n, C)`; and the answers, token ids `(n,)`, int64. Questions come story by story, in the order of a story.
# - The model reads each story as it is, with all its answers: what is asked later may build on an earlier answer.
# - The lists of the caller stay as they are.

# %%
from collections.abc import Callable

import torch
from torch import Tensor

PAD, ASK = 0, 1
Model = Callable[[Tensor], Tensor]


# %%
def answer_states_as_found(
    model: Model, stories: list[list[int]]
) -> tuple[Tensor, Tensor]:
    """The state in front of each answer, (n, C), and the answers (n,)."""
    T = max(len(story) for story in stories)
    ids = torch.tensor([story + [PAD] * (T - len(story)) for story in stories])
    asked = ids[:, :-1] == ASK
    answers = ids[:, 1:]
    states = model(ids)[:, 1:]
    return states[asked], answers[asked]


# %%
from lm_from_scratch.exercises import check

check("hunt_probe", answer_states_as_found)

# %% [markdown]
# All shapes fit, and that is why it ran. Before you write: which of the last three sentences of the second paragraph is the
# strongest sign that the number is meaningless? Each of them is a *control*.


# %%
def answer_states(
    model: Model, stories: list[list[int]]
) -> tuple[Tensor, Tensor]:
    """The state in front of each answer, (n, C), and the answers (n,)."""
    ### BEGIN SOLUTION
    T = max(len(story) for story in stories)
    ids = torch.tensor([story + [PAD] * (T - len(story)) for story in stories])
    asked = ids[:, :-1] == ASK
    answers = ids[:, 1:]
    states = model(ids)[:, :-1]
    return states[asked], answers[asked]
    ### END SOLUTION


# %%
from lm_from_scratch.exercises import check

points = check("hunt_probe", answer_states)
### BEGIN HIDDEN TESTS
points = min(points, check("hunt_probe", answer_states, seed=7341))
### END HIDDEN TESTS
float(points)
