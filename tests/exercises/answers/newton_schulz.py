"""Other right answers to newton_schulz."""

import torch

from lm_from_scratch.optim.muon import COEFFICIENTS


def normalised(G):
    norm = G.square().sum().sqrt()
    return G / max(float(norm), 1e-7), 0.2 * max(G.shape) ** 0.5


def by_values(G, steps=5):
    """A singular value decomposition, and the polynomial of numbers."""
    a, b, c = COEFFICIENTS
    X, scale = normalised(G)
    U, s, Vh = torch.linalg.svd(X, full_matrices=False)
    for _ in range(steps):
        s = a * s + b * s**3 + c * s**5
    return U * (s * scale) @ Vh


def by_other_side(G, steps=5):
    """The product on the right for a tall matrix, without a transpose."""
    a, b, c = COEFFICIENTS
    X, scale = normalised(G)
    for _ in range(steps):
        if X.shape[0] > X.shape[1]:
            A = X.T @ X
            X = X @ (a * torch.eye(len(A), dtype=A.dtype) + b * A + c * A @ A)
        else:
            A = X @ X.T
            X = (a * torch.eye(len(A), dtype=A.dtype) + b * A + c * A @ A) @ X
    return X * scale


def by_products(G, steps=5):
    """Cubes and fifth powers of the matrix, one after the other."""
    a, b, c = COEFFICIENTS
    X, scale = normalised(G)
    flip = X.shape[0] > X.shape[1]
    X = X.T if flip else X
    for _ in range(steps):
        A = X @ X.T
        cube = A @ X
        X = a * X + b * cube + c * (A @ cube)
    return scale * (X.T if flip else X)


def by_once(G, steps=5):
    """Only the small product is repeated: what multiplies X in the end is a function of it."""
    a, b, c = COEFFICIENTS
    X, scale = normalised(G)
    X = X if G.shape[0] <= G.shape[1] else X.mT
    values, Q = torch.linalg.eigh(X @ X.mT)
    values = values.clamp(min=0)
    factor = torch.ones_like(values)
    for _ in range(steps):
        now = values * factor**2
        factor = factor * (a + b * now + c * now**2)
    Y = (Q * factor) @ (Q.mT @ X) * scale
    return Y if G.shape[0] <= G.shape[1] else Y.mT


RIGHT = [by_values, by_other_side, by_products, by_once]

SURVIVORS = {
    "X = X * 0.2 * math.sqrt(max(m, n)): max(m, n) => max(n, m)": (
        "the larger of two numbers is the same in either order"
    )
}
