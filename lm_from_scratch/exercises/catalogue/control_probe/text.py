# %% [markdown]
# # A probe and its control
#
# A probe reads something off a model's states with one matrix, and is right in 95 of 100 cases. Is that much? The states
# know which word was read, and the word alone may give the answer away. So the same probe gets a *control task* on the
# same states: each word of the vocabulary has a class that was drawn at random. There is nothing in the model to be
# found for it. What the probe gets right all the same, it has learned by heart, word by word.
#
# Write the measurement. The probe is given: it remembers the mean state of each class, and says the class whose mean is
# nearest.
#
# What holds for your function:
#
# - `states` is float64, `(N, C)`. `labels` `(N,)` holds their classes, from 0 to `n_classes` - 1, and `words` `(N,)`
#   the word at which each state was read, a row of the vocabulary.
# - `drawn` `(V,)` is the control task: the class that was drawn for each word of the vocabulary, once and for all. It has
#   the same `n_classes` classes.
# - `held_out` `(N,)` is True for the states on which accuracies are measured. Nothing about them is known before that.
#   The probe is fitted on all others. Among these, every class occurs, in both tasks.
# - Features may be of very different sizes, so states are standardised: the mean over states is subtracted from each
#   feature, and it is divided by its standard deviation. Both are those of the states on which the probe is fitted, also
#   where it is used.
# - The result is a dict of three Python floats: `"accuracy"`, the share of the held-out states whose class the probe says;
#   `"control"`, the same for a probe that is fitted and measured on the control task; and `"selectivity"`, accuracy minus
#   control.
# - The arguments stay as they are.

# %%
import torch
from torch import Tensor


def fit(z: Tensor, y: Tensor, n_classes: int) -> Tensor:
    """A probe (n_classes, C): the mean state of each class."""
    return torch.stack([z[y == c].mean(dim=0) for c in range(n_classes)])


def says(probe: Tensor, z: Tensor) -> Tensor:
    """The class (N,) that a probe says of states z (N, C)."""
    distances = (z[:, None] - probe).square().sum(dim=-1)
    return distances.argmin(dim=-1)


# %%
def control_probe(
    states: Tensor,
    labels: Tensor,
    words: Tensor,
    drawn: Tensor,
    held_out: Tensor,
    n_classes: int,
) -> dict[str, float]:
    """The accuracy of a probe, that of its control, and the difference."""
    ### BEGIN SOLUTION
    fitted = states[~held_out]
    mean, scale = fitted.mean(dim=0), fitted.std(dim=0)
    z = (states - mean) / scale

    def accuracy(y: Tensor) -> float:
        probe = fit(z[~held_out], y[~held_out], n_classes)
        said = says(probe, z[held_out])
        return (said == y[held_out]).double().mean().item()

    own = accuracy(labels)
    control = accuracy(drawn[words])
    return {"accuracy": own, "control": control, "selectivity": own - control}
    ### END SOLUTION


# %%
from lm_from_scratch.exercises import check

points = check("control_probe", control_probe)
### BEGIN HIDDEN TESTS
points = min(points, check("control_probe", control_probe, seed=7341))
### END HIDDEN TESTS
float(points)
