# %% [markdown]
# # Targets of a chat
#
# A model becomes an assistant by learning from chats in which only the assistant's words count. The model reads the
# question, but never has to predict it. Each chat is one list of token ids, and we know which of them the assistant
# wrote:
#
# | place | 0 | 1 | 2 | 3 | 4 | 5 | 6 | 7 | 8 | 9 |
# |---|---|---|---|---|---|---|---|---|---|---|
# | token | start | user | 47 | 31 | end | start | assistant | 80 | 12 | end |
#
# Here the *span* of the answer is `(7, 9)`: the answer begins at place 7, and the token that ends the turn is at place
# 9. Without that token the model would never learn to stop, so **it counts as well**.
#
# Write the targets of a batch of such chats: for each token the next one, if the assistant wrote it, and -100
# everywhere else. What holds for your function:
#
# - `chats` is a list of lists of token ids, each with at least one token. `spans` has one list for each chat: pairs
#   `(start, end)` in order, without overlap, one for each turn of the assistant. There may be none.
# - The answer of a span is at the places `start` to `end - 1`; the token at `end` ends the turn. An answer may be
#   empty (`start == end`): then only the end of the turn counts. A chat may begin with an answer (`start == 0`).
# - Every turn ends with the same token, the user's turns too. Any token may be part of an answer, including 0, the
#   tokens of the question, and the token that ends a turn.
# - The result is int64 of shape `(len(chats), length)`. A shorter chat is padded on the right, and padding has no
#   target. Of a longer chat only the first `length` tokens are kept; the tokens that are cut off are no targets either.
#   A span may lie partly or wholly in the part that is cut off.
# - The lists of the caller stay as they are.

# %%
import torch
from torch import Tensor

IGNORE = -100


# %%
def answer_targets(
    chats: list[list[int]], spans: list[list[tuple[int, int]]], length: int
) -> Tensor:
    """The next token where the assistant writes it, -100 elsewhere."""
    ### BEGIN SOLUTION
    targets = torch.full((len(chats), length), IGNORE)
    for row, chat, answers in zip(targets, chats, spans):
        ids = torch.tensor(chat[:length])
        for start, end in answers:
            first = max(start, 1)  # nothing is before the first token
            said = ids[first : end + 1]
            row[first - 1 : first - 1 + len(said)] = said
    return targets
    ### END SOLUTION


# %%
from lm_from_scratch.exercises import check

points = check("answer_targets", answer_targets)
### BEGIN HIDDEN TESTS
points = min(points, check("answer_targets", answer_targets, seed=7341))
### END HIDDEN TESTS
float(points)
