"""Other right answers to measure_rate."""

import torch


def by_companion(H, rates, momentum=0.0, decay=0.0):
    """A step is a matrix of 2 x 2 for each direction: it grows if an eigenvalue is above 1."""
    verdicts = []
    for rate in rates:
        largest = 0.0
        for h in (torch.linalg.eigvalsh(H) + decay).tolist():
            step = torch.tensor([[1 - rate * h, -rate * momentum], [h, momentum]])
            largest = max(largest, float(torch.linalg.eigvals(step).abs().max()))
        verdicts.append(largest > 1 + 1e-3)
    return verdicts


def by_torch(H, rates, momentum=0.0, decay=0.0):
    """The optimizer itself, with a group of parameters for each rate."""
    start = torch.ones(len(H), dtype=torch.float64).cumsum(0).sqrt()
    points = [start.clone() for _ in rates]
    groups = [{"params": [x], "lr": rate} for x, rate in zip(points, rates, strict=True)]
    optimizer = torch.optim.SGD(groups, momentum=momentum, weight_decay=decay, foreach=False)
    for _ in range(250):
        for x in points:
            x.grad = H @ x
        optimizer.step()
    return [not bool(x.norm() < 1e3 * start.norm()) for x in points]


def by_one_matrix(H, rates, momentum=0.0, decay=0.0):
    """One step of x and v as one matrix, squared ten times."""
    n, verdicts = len(H), []
    eye = torch.eye(n, dtype=torch.float64)
    A = H + decay * eye
    for rate in rates:
        step = torch.cat(
            [
                torch.cat([eye - rate * A, -rate * momentum * eye], 1),
                torch.cat([A, momentum * eye], 1),
            ]
        )
        for _ in range(9):
            step = step @ step
        verdicts.append(not bool(step.norm() < 1e5))
    return verdicts


def by_rayleigh(H, rates, momentum=0.0, decay=0.0):
    """Singular values for the steepest direction, a factorisation for one that falls."""
    A = H + (decay + 1e-7) * torch.eye(len(H), dtype=torch.float64)
    if torch.linalg.cholesky_ex(A).info:
        return [True for _ in rates]
    steepest = float(torch.linalg.matrix_norm(A, 2))
    return [rate > 2 * (1 + momentum) / steepest for rate in rates]


RIGHT = [by_companion, by_torch, by_one_matrix, by_rayleigh]

SURVIVORS = {
    "if lowest < -1e-09:: lowest < -1e-09 => lowest <= -1e-09": "no direction falls so little",
    "if lowest < -1e-09:: 1e-09 => 2e-09": "no direction falls so little",
    "return [rate * highest > 2 * (1 + momentum) for rate in rates]: "
    "rate * highest > 2 * (1 + momentum) => rate * highest >= 2 * (1 + momentum)": (
        "no rate lies on the border"
    ),
}
