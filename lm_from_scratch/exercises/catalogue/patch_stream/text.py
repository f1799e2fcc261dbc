# %% [markdown]
# # One state of another run
#
# Two texts of equal length differ in one word. A model reads the first, but in front of one block some of its tokens
# get the states that they have when the model reads the second. If what comes out is now the second's answer, the word
# passed through that place. This is *activation patching*. Write it for a stack of blocks.
#
# What holds for your function:
#
# - `blocks` is a list of L functions. Each turns a stream of shape `(B, T, C)` into one of the same shape; what a token
#   gets depends on the tokens before it, too. No block writes into what it is given.
# - `x` and `source` are two streams of shape `(B, T, C)`, in front of the first block. Both stay as they are, and so does
#   everything that a block has returned. They may be the same tensor.
# - `layer` is a number from 0 to L: the place in front of block `layer`. L is the place behind the last block.
# - `tokens` is a list of indices as Python has them, so -1 is the last token. It may be empty.
# - The result is the stream behind the last block when the model reads `x`, and at the place `layer` these tokens, in
#   every row, have the states that they have there when it reads `source`. Before that place and at all other tokens
#   nothing is replaced.
# - Gradients reach `x` and `source`.
#
# Two laws hold for any blocks. With all tokens patched, the result is that of reading `source`. With a run's own states
# put in their own place, nothing changes.

# %%
from collections.abc import Callable

import torch

Tensor = torch.Tensor
Block = Callable[[Tensor], Tensor]


# %%
def patch_stream(
    blocks: list[Block],
    x: Tensor,
    source: Tensor,
    layer: int,
    tokens: list[int],
) -> Tensor:
    """The stream behind the last block, with states of another run."""
    ### BEGIN SOLUTION
    for block in blocks[:layer]:
        x = block(x)
        source = block(source)
    patched = x.clone()
    patched[:, tokens] = source[:, tokens]
    for block in blocks[layer:]:
        patched = block(patched)
    return patched
    ### END SOLUTION


# %%
from lm_from_scratch.exercises import check

points = check("patch_stream", patch_stream)
### BEGIN HIDDEN TESTS
points = min(points, check("patch_stream", patch_stream, seed=7341))
### END HIDDEN TESTS
float(points)
