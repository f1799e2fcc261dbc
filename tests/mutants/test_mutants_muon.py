"""Classic mistakes of Muon: its coefficients, its norm, the momentum, the scale of a shape."""

import pytest
from mutation import Mutant, killer, laws_in, mutants

LAWS = laws_in("unit/optim/test_muon.py", most=4)

DIVIDED = "X / X.norm().clamp(min=SMALLEST_NORM)"
MEAN = "mean.lerp_(grad, 1 - momentum)"

MISTAKES = {
    "optim.muon:orthogonalize": [
        ("the coefficient of the cube is off", "beta=b", "beta=b + 0.018"),
        ("two coefficients change places", "a, b, c = coefficients", "a, c, b = coefficients"),
        ("no division by the norm", DIVIDED, "X / 1.0"),
        ("divided by the largest entry", "X.norm()", "X.abs().max()"),
        ("a norm of 0 is not guarded", ".clamp(min=SMALLEST_NORM)", ""),
        ("a tall matrix is not turned", "G.shape[0] > G.shape[1]", "False", 2),
        ("one step too few", "range(steps)", "range(steps - 1)"),
    ],
    "optim.muon:Muon.update_matrix": [
        ("momentum does not look ahead", 'if group["nesterov"]', "if False"),
        ("the mean keeps the wrong share", MEAN, "mean.lerp_(grad, momentum)"),
        ("the decay is part of the gradient", MEAN,
         'grad = grad + group["weight_decay"] * p\n        mean.lerp_(grad, 1 - momentum)'),
        ("the decay is scaled by the shape", '1 - lr * group', '1 - lr * factor * group'),
    ],
    "optim.muon:scale_of": [
        ("rows and columns exchanged", "max(1.0, m / n)", "max(1.0, n / m)"),
        ("the smaller side", "math.sqrt(max(m, n))", "math.sqrt(min(m, n))"),
    ],
}  # fmt: skip


@pytest.mark.parametrize("mutant", mutants(MISTAKES))
def test_a_law_finds_the_mistake(mutant: Mutant) -> None:
    assert killer(mutant, LAWS)
