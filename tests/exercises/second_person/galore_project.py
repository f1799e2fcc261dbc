"""Answers to galore_project that were written from its text alone."""

import torch


def wide(x):
    return x.to(torch.promote_types(x.dtype, torch.float32))


class RightBySide:
    def __init__(self, grad, rank, projection_type="std"):
        g = wide(grad.detach())
        m, n = g.shape
        self.right = (m >= n) == (projection_type == "std")
        u, _, vh = torch.linalg.svd(g, full_matrices=False)
        self.basis = (vh[:rank].T if self.right else u[:, :rank]).contiguous().clone()

    def project(self, grad):
        grad = wide(grad)
        return grad @ self.basis if self.right else self.basis.T @ grad

    def project_back(self, low):
        low = wide(low)
        return low @ self.basis.T if self.right else self.basis @ low


class RightByEigenvectors:
    def __init__(self, grad, rank, projection_type="std"):
        g = wide(grad)
        tall = g.shape[0] >= g.shape[1]
        self.right = tall if projection_type == "std" else not tall
        u, _, v = torch.svd(g)
        side = v if self.right else u
        self.basis = torch.stack([side[:, i] for i in range(min(rank, side.shape[1]))], dim=1)

    def project(self, grad):
        if self.right:
            return torch.einsum("mn,nr->mr", wide(grad), self.basis)
        return torch.einsum("mr,mn->rn", self.basis, wide(grad))

    def project_back(self, low):
        if self.right:
            return torch.einsum("mr,nr->mn", wide(low), self.basis)
        return torch.einsum("mr,rn->mn", self.basis, wide(low))


class ViewOfTheFactor(RightBySide):
    def __init__(self, grad, rank, projection_type="std"):
        super().__init__(grad, rank, projection_type)
        u, _, vh = torch.linalg.svd(wide(grad), full_matrices=False)
        self.basis = vh[:rank].mT if self.right else u[:, :rank]


class GradientKept(RightBySide):
    def __init__(self, grad, rank, projection_type="std"):
        self.grad = grad
        super().__init__(grad, rank, projection_type)


class SideFromTheCoordinates(RightBySide):
    def project_back(self, low):
        low = wide(low)
        fits = low.shape[1] == self.basis.shape[1]
        return low @ self.basis.T if fits else self.basis @ low


class SquareGoesLeft(RightBySide):
    def __init__(self, grad, rank, projection_type="std"):
        super().__init__(grad, rank, projection_type)
        self.right = (grad.shape[0] > grad.shape[1]) == (projection_type == "std")
        u, _, vh = torch.linalg.svd(wide(grad), full_matrices=False)
        self.basis = (vh[:rank].mT if self.right else u[:, :rank]).clone()


class SidesSwapped(RightBySide):
    def __init__(self, grad, rank, projection_type="std"):
        other = "reverse_std" if projection_type == "std" else "std"
        super().__init__(grad, rank, other)


class RowsOfVhTakenAsColumns(RightBySide):
    def __init__(self, grad, rank, projection_type="std"):
        super().__init__(grad, rank, projection_type)
        if self.right:
            _, _, vh = torch.linalg.svd(wide(grad), full_matrices=False)
            self.basis = vh[:, :rank].clone()


class SmallestDirections(RightBySide):
    def __init__(self, grad, rank, projection_type="std"):
        super().__init__(grad, rank, projection_type)
        u, _, vh = torch.linalg.svd(wide(grad), full_matrices=False)
        self.basis = (vh[-rank:].mT if self.right else u[:, -rank:]).clone()


class TimesSingularValues(RightBySide):
    def __init__(self, grad, rank, projection_type="std"):
        super().__init__(grad, rank, projection_type)
        s = torch.linalg.svdvals(wide(grad))[: self.basis.shape[1]]
        self.basis = self.basis * s


class AlwaysFloat32(RightBySide):
    def __init__(self, grad, rank, projection_type="std"):
        super().__init__(grad.float(), rank, projection_type)

    def project(self, grad):
        return super().project(grad.float())

    def project_back(self, low):
        return super().project_back(low.float())


class BackToTheDtypeOfTheGradient(RightBySide):
    def project(self, grad):
        return super().project(grad).to(grad.dtype)


class SvdInTheNarrowDtype(RightBySide):
    def __init__(self, grad, rank, projection_type="std"):
        super().__init__(grad, rank, projection_type)
        self.basis = self.basis.to(grad.dtype)

    def project(self, grad):
        grad = grad.to(self.basis.dtype)
        return grad @ self.basis if self.right else self.basis.T @ grad

    def project_back(self, low):
        low = low.to(self.basis.dtype)
        return low @ self.basis.T if self.right else self.basis @ low


class ProjectedTwice(RightBySide):
    def project_back(self, low):
        low = wide(low)
        return low @ self.basis if self.right else self.basis.T @ low


class FullBasisFromFullMatrices(RightBySide):
    def __init__(self, grad, rank, projection_type="std"):
        super().__init__(grad, rank, projection_type)
        u, _, vh = torch.linalg.svd(wide(grad), full_matrices=True)
        self.basis = (vh[:rank].mT if self.right else u[:, :rank]).clone()


class BasisMadeAnewForEachGradient(RightBySide):
    def __init__(self, grad, rank, projection_type="std"):
        super().__init__(grad, rank, projection_type)
        self.rank, self.kind = rank, projection_type

    def project(self, grad):
        fresh = RightBySide(grad, self.rank, self.kind)
        self.basis = fresh.basis
        return super().project(grad)


ANSWERS = {
    ViewOfTheFactor: "the basis is a view that keeps the whole factor in memory",
    GradientKept: "the gradient stays in the object",
    SideFromTheCoordinates: (
        "the way back guesses the side from the shape of the coordinates, a square is tall"
    ),
    SquareGoesLeft: "a square matrix is taken for a wide one",
    SidesSwapped: "std and reverse_std are exchanged",
    RowsOfVhTakenAsColumns: "the columns of Vh, not its rows",
    SmallestDirections: "the weakest directions, not the leading ones",
    TimesSingularValues: "the basis is scaled by the singular values",
    AlwaysFloat32: "",
    BackToTheDtypeOfTheGradient: "",
    SvdInTheNarrowDtype: "",
    ProjectedTwice: "",
    FullBasisFromFullMatrices: "all singular vectors, beyond the smaller side too",
    BasisMadeAnewForEachGradient: "a new basis from every gradient",
}
RIGHT = [RightBySide, RightByEigenvectors]
