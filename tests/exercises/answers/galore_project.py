"""Answers to galore_project: other right ones, and wrong ones of a second person."""

import torch
from torch import Tensor, nn

from lm_from_scratch.exercises.catalogue.galore_project.checks import PackageProjection
from lm_from_scratch.optim.galore_basis import sides


class ByGram(PackageProjection):
    """Eigenvectors of the smaller product of the gradient with itself."""

    method = "gram"


class ByModule(nn.Module):
    """The projection as a module with a buffer, and a matrix that is turned on the way."""

    basis: Tensor

    def __init__(self, grad, rank, projection_type="std"):
        super().__init__()
        grad = grad.float() if grad.dtype != torch.float64 else grad
        m, n = grad.shape
        self.turned = (m < n) == (projection_type == "std")
        x = grad.T if self.turned else grad
        values, vectors = torch.linalg.eigh(x.T.double() @ x.double())
        order = values.argsort(descending=True)[: min(rank, m, n)]
        self.register_buffer("basis", vectors[:, order].to(grad.dtype))

    def project(self, grad):
        grad = grad.to(self.basis.dtype)
        return (grad.T @ self.basis).T if self.turned else grad @ self.basis

    def project_back(self, low):
        return (self.basis @ low) if self.turned else torch.einsum("mr,nr->mn", low, self.basis)


class ByWholeFactors(PackageProjection):
    """All singular vectors are made, and the leading ones copied."""

    def __init__(self, grad, rank, projection_type="std"):
        left, _ = sides((grad.shape[0], grad.shape[1]), projection_type)
        wide = grad if grad.dtype == torch.float64 else grad.float()
        U, _, Vh = torch.linalg.svd(wide, full_matrices=True)
        number = min(rank, *grad.shape)
        columns = torch.arange(number)
        self.basis = U.index_select(1, columns) if left else Vh.index_select(0, columns).mT
        self.left, self.right = (self.basis, None) if left else (None, self.basis)


class ByAnotherBasis(PackageProjection):
    """Other vectors of the same space: the basis turned in itself."""

    def __init__(self, grad, rank, projection_type="std"):
        super().__init__(grad, rank, projection_type)
        assert self.basis is not None
        r = self.basis.shape[1]
        sums = torch.ones(r, r, dtype=self.basis.dtype).triu()
        self.basis = (self.basis @ torch.linalg.qr(sums).Q).contiguous()
        self.left, self.right = (self.basis, None) if self.left is not None else (None, self.basis)


RIGHT = [ByGram, ByModule, ByWholeFactors, ByAnotherBasis]

BACK = "return self.basis @ low if"
COORDINATES = "self.basis.mT @ grad if self.left else grad @ self.basis"

WRONG = [
    ("always in float32",
     {"svd(wide(grad)": "svd(grad.float()", "grad = wide(grad)": "grad = grad.float()",
      BACK: f"low = low.float()\n        {BACK}"}),
    ("the coordinates go back to the dtype of the gradient",
     {"grad = wide(grad)": "dtype, grad = grad.dtype, wide(grad)",
      COORDINATES: f"({COORDINATES}).to(dtype)", BACK: f"low = wide(low)\n        {BACK}"}),
    ("the basis is in the dtype of the gradient",
     {"leading.clone()": "leading.clone().to(grad.dtype)",
      "wide(grad)\n": "grad.to(self.basis.dtype)\n",
      BACK: f"low = low.to(self.basis.dtype)\n        {BACK}"}),
    ("projected twice",
     {"self.basis @ low if self.left else low @ self.basis.mT":
      "self.basis.mT @ low if self.left else low @ self.basis"}),
]  # fmt: skip
