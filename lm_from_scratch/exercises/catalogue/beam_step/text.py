# %% [markdown]
# # One step of beam search
#
# Beam search keeps the n most likely beginnings of a text, the *beams*. A step makes each of them
# one token longer in every possible way: n beams and V tokens give n V candidates. A candidate's
# score is the log-probability of its whole text, a sum:
#
# $$s'_{b,v} = s_b + \log p(v \mid x, \text{beam } b)$$
#
# The best candidates of all are the next beams, whichever beams they come from. One token, the stop
# token, ends a text. A candidate with it never goes on. It counts as ended if it is among the n best
# of its step, and is dropped otherwise. Write this step for several prompts at once.
#
# What holds for your function:
#
# - `scores` has shape `(B, n)`: the log-probabilities of the n beams of each of B prompts.
#   `log_probs` has shape `(B, n, V)`: those of the next token after each beam, in any order in
#   memory. `stop` is the id of the stop token, from 0 to V - 1. Prompts share nothing.
# - The result is a tuple of four tensors of shape `(B, n)`: scores, parents, tokens, ended.
# - The first three describe the n best candidates of each prompt that do not end with the stop token,
#   the best first: their scores, the number (0 to n - 1) of the beam that each continues, and the
#   token that it adds. Parents and tokens are int64.
# - `ended[i, b]` is the score of beam b of prompt i followed by the stop token, if that is among the
#   n best of all candidates of the prompt, with and without the stop token. Otherwise it is minus
#   infinity.
# - A beam with the score minus infinity does not exist yet: before the first step there is only one.
#   There are always at least n candidates without the stop token, all scores are different, and n
#   may be larger than V.
# - Scores may be as low as -1000. They have the dtype of `scores`, and are not normalised by length.
# - `scores` and `log_probs` stay as they are.

# %%
import math

import torch


# %%
def beam_step(
    scores: torch.Tensor, log_probs: torch.Tensor, stop: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Scores, parents and tokens of the next beams, and what has ended: each (B, n)."""
    ### BEGIN SOLUTION
    n, V = log_probs.shape[1:]
    totals = scores[:, :, None] + log_probs
    nth_best = totals.flatten(1).topk(n).values[:, -1:]
    ends = totals[:, :, stop]
    ended = ends.masked_fill(ends < nth_best, -math.inf)
    totals[:, :, stop] = -math.inf
    best, place = totals.flatten(1).topk(n)
    return best, place // V, place % V, ended
    ### END SOLUTION


# %%
from lm_from_scratch.exercises import check

points = check("beam_step", beam_step)
### BEGIN HIDDEN TESTS
points = min(points, check("beam_step", beam_step, seed=7341))
### END HIDDEN TESTS
float(points)
