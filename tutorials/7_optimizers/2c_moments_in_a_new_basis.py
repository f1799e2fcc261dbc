r"""
The moments in a new basis
==========================

Every few hundred steps `GaLore <2_galore.ipynb>`_ makes a new basis. AdamW's two moments were counted in the old one. Do
they still mean anything? There are three answers, keep, turn and reset, and this page tries them.

Letters: the columns of :math:`P`, the left basis of a gradient, are r orthonormal directions; those of a right basis
:math:`Q` are, too.

Three choices
-------------

A new basis gives new meanings to the columns of the moments. The paper *keeps* the numbers all the same (bug museum:
L6), and a reader asked `why they are not projected anew <https://github.com/jiaweizzhao/GaLore/issues/54>`_.

An experiment shows what happens to the first moment. The gradient is constant but for a little noise, has rank 2 and
two equal singular values, so that every new basis is another one of the same plane.
"""

# sphinx_gallery_needs = ["2b_galore_in_depth"]
# sphinx_gallery_words = ["rotate moments", "LDAdam", "optimizer state after projection update", "reset optimizer state", "ReLoRA"]
# sphinx_gallery_museum = ["L6"]
import matplotlib.pyplot as plt
import torch
from torch import nn

from lm_from_scratch.instruments.plot import figure
from lm_from_scratch.optim.galore import GaLore
from lm_from_scratch.optim.galore_basis import project_back, rotate_moments

generator = torch.Generator().manual_seed(0)
a = torch.linalg.qr(torch.randn(12, 2, generator=generator)).Q
b = torch.linalg.qr(torch.randn(9, 2, generator=generator)).Q
true = a @ b.mT  # (12, 9), singular values 1 and 1
noisy = true + 0.01 * torch.randn(100, 12, 9, generator=generator)

made, (ax,) = figure(4.8, 3.6)
worst = {}
for choice, method, style in (
    ("keep", "gram", ":"),
    ("rotate", "gram", "-"),
    ("reset", "gram", "--"),
    ("keep", "subspace", "-."),
):
    p = nn.Parameter(torch.zeros(12, 9))
    optimizer = GaLore(
        [p], rank=2, update_proj_gap=10, moments=choice, basis=method
    )
    cosines = []
    for g in noisy:
        p.grad = g
        optimizer.step()
        state = optimizer.state[p]
        mean = project_back(state["exp_avg"], None, state["right"])
        cosines.append(torch.cosine_similarity(mean.view(-1), true.view(-1), 0))
    label = choice if method == "gram" else f"{choice}, {method}"
    worst[label] = min(cosines).item()
    ax.plot(range(1, 101), cosines, style, label=label)
    print(f"{label:15} worst cosine {worst[label]:.4f}")
ax.set(xlabel="step", ylabel="cosine of momentum and gradient")
ax.set_title("Moments at a new basis, every 10 steps")
ax.legend(frameon=False)
plt.show()
assert worst["keep"] < 0.5
assert worst["rotate"] > 0.998 and worst["reset"] > 0.998
assert worst["keep, subspace"] > 0.99

# %%
# Kept moments point into a wrong direction after a change, until newer gradients outweigh them. The memory of the first
# is :math:`1 / (1 - \beta_1) = 10` steps, that of the second :math:`1 / (1 - \beta_2) = 1000`, more than the usual gap.
#
# The fourth line keeps its moments too. Its bases are made by subspace iteration, which starts from the old basis and
# turns it only as far as the gradient asks. Column 1 stays near column 1, and what is kept keeps its meaning. The page
# on `three ways to a basis <3c_galore_bases_in_depth.ipynb>`_ has the details.
#
# Turning them
# ~~~~~~~~~~~~
#
# The first moment represents the matrix :math:`P_{old} \, m`. Its coordinates in the new basis are
#
# .. math::
#
#    m' = P_{new}^\top P_{old} \, m = C m
#
# and nothing is lost if the new basis spans what the old one did. The second moment is a mean of squares. Coordinate i of
# the new basis is :math:`x'_i = \sum_j C_{ij} x_j`. If the old coordinates are uncorrelated, variances add up with the
# squares of the factors, and a mean square is the variance plus the squared mean:
#
# .. math::
#
#    v'_i = \sum_j C_{ij}^2 (v_j - m_j^2) + \Big( \sum_j C_{ij} m_j \Big)^2
#
# LDAdam does this. The assumption is its weak point: v does not say how two coordinates vary together. Many samples show
# where the formula holds.

C = torch.linalg.qr(torch.randn(3, 3, generator=generator)).Q
noise = torch.randn(3, 200_000, generator=generator)
mean = torch.tensor([[1.0], [-0.5], [0.2]])
mixed = torch.tensor([[2.0, 0.0, 0.0], [1.0, 0.1, 0.0], [0.3, 0.0, 0.1]])
errors = {}
for name, mix in (("uncorrelated", mixed.diag().diag()), ("correlated", mixed)):
    x = mean + mix @ noise  # samples of three coordinates
    m, v = x.mean(1, keepdim=True), x.square().mean(1, keepdim=True)
    m, v = rotate_moments(m, v, (torch.eye(3), None), (C.mT, None))
    turned = C @ x
    torch.testing.assert_close(m[:, 0], turned.mean(1), atol=1e-4, rtol=1e-4)
    ratio = v[:, 0] / turned.square().mean(1)
    errors[name] = (ratio - 1).abs().max().item()
    print(f"{name:13} largest relative error of v: {errors[name]:.3f}")
assert errors["uncorrelated"] < 0.02 and errors["correlated"] > 0.2

# %%
# The third choice, ``reset``, starts from zero, with the step count. Its next direction is :math:`\pm 1` everywhere, like
# that of the first step of all. `Runs with GaLore <3b_galore_runs_in_depth.ipynb>`_ compares the loss of kept and turned
# moments.
#
# Exercises
# ---------
#
# 1. *Easy.* Let the gradients of the first experiment have the singular values 2 and 1 instead of two equal ones. A right
#    answer says what that does to the line ``keep``, and why. Hint: which directions may an SVD mix?
# 2. *Medium.* Write ``rotate_moments`` with correlations: keep the whole matrix of second moments of one column. A right
#    answer has no error in both lines of the experiment, and says why the memory rules it out.
#
# Summary
# -------
#
# * At a new basis kept moments may point the wrong way; in our experiment, turned ones have a cosine above 0.998 with the
#   gradient.
# * The first moment turns exactly, as far as the new basis reaches. The second turns exactly only where coordinates are
#   uncorrelated.
# * Bases that continue the old one need no turning.
#
# Sources
# -------
#
# * Zhao et al.: `the paper on GaLore <https://arxiv.org/abs/2403.03507>`_, 2024. Moments are kept.
# * Robert et al.: `LDAdam <https://arxiv.org/abs/2410.16103>`_, 2025. Moments turned into the new basis.

import platform

import lm_from_scratch

print("python", platform.python_version())
print("torch", torch.__version__)
print("lm_from_scratch", lm_from_scratch.__version__)
