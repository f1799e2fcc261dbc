# %% [markdown]
# # Bug hunt: an assistant that never stops
#
# A base model was trained on chats, with a loss on the assistant's words only. The loss fell lower than in any run
# before. Then somebody talked to the model. Its answers are sensible, but it does not stop after them: it writes more
# answers, then a question of its own, up to the limit of tokens. And the *first* word of an answer is often odd, or no
# word at all.
#
# The tokenizer of the base model had no token for padding, so somebody used the token that ends a turn.
#
# Find what is wrong, and write the function again. What holds for it:
#
# - `chats` is a list of at least one chat; each is a list of at least two token ids. A turn begins with `START` and a
#   role, `USER` or `ASSISTANT`, and ends with `END`, but the last turn of a chat may be cut off anywhere. `START`
#   appears only where a turn begins, and `END` only where one ends. `ASSISTANT` may appear in a text, like any other
#   token.
# - In a turn of the assistant, everything after the role counts: its words and its `END`. An answer may be empty.
# - The result is a dict of two int64 tensors of shape `(len(chats), T)`, where T is the length of the longest chat.
#   `input_ids` holds the chats, filled up with `PAD` on the right.
# - `targets` holds at each place the *next* token, if that one counts, and -100 everywhere else. (So the loss does not
#   shift any more.) Padding is never a target.
# - The lists of the caller stay as they are.

# %%
import torch
from torch import Tensor

START, END, USER, ASSISTANT = 1, 2, 3, 4
PAD, IGNORE = END, -100


# %%
def chat_batch_as_found(chats: list[list[int]]) -> dict[str, Tensor]:
    """Token ids of chats, and the targets of what the assistant says."""
    T = max(len(chat) for chat in chats)
    ids = torch.tensor([chat + [PAD] * (T - len(chat)) for chat in chats])
    counts = torch.zeros(ids.shape, dtype=torch.bool)
    for row, chat in zip(counts, chats):
        inside = False
        for place, token in enumerate(chat):
            if token == START:
                inside = False
            row[place] = inside
            if chat[place - 1 : place + 1] == [START, ASSISTANT]:
                inside = True
    targets = ids.roll(-1, dims=1)
    targets[:, -1] = IGNORE
    targets = targets.masked_fill(~counts, IGNORE)
    targets = targets.masked_fill(targets == PAD, IGNORE)
    return {"input_ids": ids, "targets": targets}


# %%
from lm_from_scratch.exercises import check

check("hunt_answer_mask", chat_batch_as_found)

# %% [markdown]
# There are two mistakes, and each has its own symptom. Say which symptom belongs to which mistake before you write.


# %%
def chat_batch(chats: list[list[int]]) -> dict[str, Tensor]:
    """Token ids of chats, and the targets of what the assistant says."""
    ### BEGIN SOLUTION
    T = max(len(chat) for chat in chats)
    ids = torch.tensor([chat + [PAD] * (T - len(chat)) for chat in chats])
    targets = torch.full(ids.shape, IGNORE)
    for row, chat in zip(targets, chats):
        inside = False
        for place in range(1, len(chat)):
            if chat[place] == START:
                inside = False
            if inside:
                row[place - 1] = chat[place]
            if chat[place - 1 : place + 1] == [START, ASSISTANT]:
                inside = True
    return {"input_ids": ids, "targets": targets}
    ### END SOLUTION


# %%
from lm_from_scratch.exercises import check

points = check("hunt_answer_mask", chat_batch)
### BEGIN HIDDEN TESTS
points = min(points, check("hunt_answer_mask", chat_batch, seed=7341))
### END HIDDEN TESTS
float(points)
