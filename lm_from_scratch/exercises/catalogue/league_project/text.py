# %% [markdown]
# # Beat the league
#
# In the league of chapter 11, methods of interpretability play against one another on the model `worlds`. Each learns
# from the states of some stories and their right rooms. Then it *reads* new states, which means that it names their
# rooms or abstains, and it *writes*: it changes states so that the model says other rooms.
#
# Write a method of your own. There is no maximum: the check plays your method on stories that you have not seen, and
# prints its row below those of the page. The points are marks on the way.
#
# | mark | holds if |
# |---|---|
# | as a guess | it names the right room in more than two thirds as many stories as a guess does |
# | false claims | so, and its share of false claims is below nine tenths of that of a guess |
# | mean difference | it names more right rooms than the mean difference does |
# | the probe | it names more right rooms than the linear probe, and than any other method in the table |
# | control | taught with shuffled rooms, it names the right one in less than a quarter of the stories |
# | flips | it flips more answers than the mean difference does |
# | the league | its flips are at least ten points above those of any other method in the table |
#
# What holds for your function:
#
# - `states` is float32, `(N, C)`: the states in front of the last block, at the last token before the room, of stories
#   whose rooms you are told. `rooms` `(N,)` holds these, numbers from 0 to 7, in the order of `ROOMS`. All eight occur.
# - `model` is `worlds` with its weights, and `layer` the number of the place. You need not use them.
# - The result is a pair of functions. `read` takes states `(M, C)` of new stories, and returns whole numbers `(M,)`: the
#   room of each, or -1 where you abstain. `write` takes states `(M, C)` and rooms `(M,)`, and returns states of the same
#   shape and dtype that say these rooms. Every state moves, and where to depends on the room.
# - Both treat each state by itself: what they do does not depend on the other states of the call.
# - Right rooms come from `states` and `rooms` of this call alone. So a method that learns from shuffled rooms knows
#   nothing, as the mark "control" wants it.
# - Flips are measured at size 1: the change is scaled to the length of the state. Only its direction counts.
# - The arguments stay as they are, those of `read` and `write` too, and so do the weights.
#
# The page has 300 labelled stories, and so does the check. It has 240 new ones.

# %%
import torch
from torch import Tensor

from lm_from_scratch.checkpoint.weights import load_shipped
from lm_from_scratch.inside.league import Read, Write
from lm_from_scratch.models.interface import CausalLM
from lm_from_scratch.text.story_grammar import ROOMS


def room_words() -> Tensor:
    """The token (8,) of each room, if you want to use the model's head."""
    _, tokenizer = load_shipped("worlds")
    words = [tokenizer.encode(f" {room}")[0] for room in ROOMS]
    return torch.tensor(words)


# %%
def league_method(
    model: CausalLM, layer: int, states: Tensor, rooms: Tensor
) -> tuple[Read, Write]:
    """A pair: the function that reads and the one that writes."""
    ### BEGIN SOLUTION
    middle = states.mean(dim=0)
    means = torch.stack([states[rooms == r].mean(dim=0) for r in range(8)])
    spread = torch.cov((states - means[rooms]).T)
    spread += 0.1 * spread.diagonal().mean() * torch.eye(len(spread))
    weight = torch.linalg.solve(spread, (means - middle).T)  # (C, 8)

    def read(x: Tensor) -> Tensor:
        scores = (x - middle) @ weight
        sure, room = scores.softmax(dim=-1).max(dim=-1)
        return torch.where(sure > 0.4, room, -1)

    head = model.head(torch.eye(len(middle)))[:, room_words()].T  # (8, C)
    directions = head - head.mean(dim=0)

    def write(x: Tensor, new: Tensor) -> Tensor:
        return x + directions[new]

    return read, write
    ### END SOLUTION


# %%
from lm_from_scratch.exercises import check

points = check("league_project", league_method)
### BEGIN HIDDEN TESTS
points = min(points, check("league_project", league_method, seed=7341))
### END HIDDEN TESTS
float(points)
