# %% [markdown]
# # Learn from a teacher's probabilities
#
# A label says which token came next. A *teacher*, a trained model, says how probable it finds every token, and a
# *student* can imitate all of that. A temperature $\tau$ above 1 flattens both distributions, so that the small
# probabilities count as well:
#
# $$\mathcal{L} = \tau^2 \sum_v p_v \left( \log p_v - \log q_v \right), \qquad
# p = \mathrm{softmax}(\text{teacher} / \tau), \quad q = \mathrm{softmax}(\text{student} / \tau)$$
#
# This is $\tau^2$ times the Kullback-Leibler divergence $\mathrm{KL}(p \,\|\, q)$, in this order. A token that is
# impossible for the teacher has a term of 0, even if it is impossible for the student too.
#
# What holds for your function:
#
# - `student` and `teacher` are logits of shape `(..., V)`, with one axis or more before the last, in any order in
#   memory. `targets` has the same shape without the last axis, int64. The loss counts where the target is not -100;
#   which token the target is does not matter.
# - `temperature` is $\tau$, 1 by default, and above 0.
# - The result is a tensor without axes: the mean over all places that count, in nats. If none counts it is 0, and so is
#   its gradient.
# - Logits may be in the thousands. The teacher may exclude tokens with -inf. The student may exclude some or all of the
#   same tokens, and no others; at least one token is left to both. Where the target is -100, both may hold anything,
#   even NaN.
# - Logits in float16 or bfloat16 are computed in float32, and the result is float32; float64 is computed in float64.
#   Both have the same dtype.
# - The gradient reaches `student`, where it is finite everywhere, and never `teacher`, even if that requires a
#   gradient. The inputs stay as they are.

# %%
import torch
from torch import Tensor

IGNORE = -100


# %%
def distillation_loss(
    student: Tensor, teacher: Tensor, targets: Tensor, temperature: float = 1.0
) -> Tensor:
    """The mean divergence of a student from its teacher, where a target counts."""
    ### BEGIN SOLUTION
    counts = targets != IGNORE
    work = torch.promote_types(student.dtype, torch.float32)
    rows, wanted = student[counts].to(work), teacher[counts].detach().to(work)
    log_q = (rows / temperature).log_softmax(-1)
    log_p = (wanted / temperature).log_softmax(-1)
    p = log_p.exp()
    terms = torch.where(p > 0, p * (log_p - log_q), 0.0)
    return temperature**2 * terms.sum() / counts.sum().clamp(min=1)
    ### END SOLUTION


# %%
from lm_from_scratch.exercises import check

points = check("distillation_loss", distillation_loss)
### BEGIN HIDDEN TESTS
points = min(points, check("distillation_loss", distillation_loss, seed=7341))
### END HIDDEN TESTS
float(points)
