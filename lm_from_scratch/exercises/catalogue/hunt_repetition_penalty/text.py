# %% [markdown]
# # Bug hunt: the penalty that rewards
#
# A program wrote text with a small GPT-2. To keep the model from repeating itself it had a
# *repetition penalty* r: before each draw, the logits of all tokens that a row already holds are
# bent, so that they become less likely.
#
# With r = 2 a user looked at three logits: 1.5, -1.5 and -1.65. The row had already said the third
# token. Its probability was 0.039 before the penalty, and 0.085 after it: the model repeated itself
# more, not less. Another user let the program write several rows at once. Some rows repeated
# themselves freely, and avoided words that they had never said.
#
# The code below is what they ran. It holds two faults. For prompts with one row and positive
# logits it does what it should, so nobody saw them.
#
# What holds for a right `penalise`:
#
# - `logits` has shape `(B, V)`, one row for each text. `idx` has shape `(B, T)` and holds the tokens
#   that each text has so far, as int64, without padding: 0 is a token like any other. `penalty` is
#   a number above 0.
# - In each row the tokens of this row are bent, and no others. A token that occurs several times is
#   bent once.
# - With a penalty above 1 a bent token never becomes more likely, whatever the sign of its logit:
#   by the factor that divides a positive logit, a negative one moves the other way. Below 1 the
#   penalty is a reward by the same two rules, and at 1 nothing changes.
# - A logit of minus infinity, a forbidden token, stays so, and makes no NaN elsewhere.
# - The result has the shape and the dtype of `logits`, and `logits` stays as it is.

# %%
import torch
from torch import Tensor


# %%
def penalise_as_found(logits: Tensor, idx: Tensor, penalty: float) -> Tensor:
    """Make the tokens that have occurred less likely."""
    logits = logits.clone()
    for token in set(idx[0].tolist()):
        logits[:, token] = logits[:, token] / penalty
    return logits


# %%
from lm_from_scratch.exercises import check

check("hunt_repetition_penalty", penalise_as_found)

# %% [markdown]
# Some checks say "must hold": the code as found passes them, and your fixed code must, too. They
# give no points. Fix the function.


# %%
def penalise(logits: Tensor, idx: Tensor, penalty: float) -> Tensor:
    """Make the tokens (B, T) that have occurred less likely in the logits (B, V) of their row."""
    ### BEGIN SOLUTION
    seen = torch.zeros_like(logits, dtype=torch.bool).scatter(1, idx, True)
    penalised = torch.where(logits > 0, logits / penalty, logits * penalty)
    return torch.where(seen, penalised, logits)
    ### END SOLUTION


# %%
from lm_from_scratch.exercises import check

points = check("hunt_repetition_penalty", penalise)
### BEGIN HIDDEN TESTS
points = min(points, check("hunt_repetition_penalty", penalise, seed=7341))
### END HIDDEN TESTS
float(points)
