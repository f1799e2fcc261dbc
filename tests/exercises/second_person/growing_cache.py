"""Answers to growing_cache that were written from its text alone."""

import torch


class RightByCat:
    def __init__(self, n_layer):
        self.n_layer = n_layer
        self.reset()

    def reset(self):
        self.held = [None] * self.n_layer
        self.count = 0

    @property
    def length(self):
        return self.count

    def see(self, T):
        positions = torch.arange(self.count, self.count + T)
        return positions, torch.arange(self.count + T)[None] <= positions[:, None]

    def check(self, layer, k, v):
        if layer not in range(self.n_layer):
            raise ValueError("layer")
        for pair in self.held:
            if pair is not None:
                for new, old in zip((k, v), pair, strict=True):
                    if new.shape[0] != old.shape[0] or new.dtype != old.dtype:
                        raise ValueError("rows or dtype")

    def update(self, layer, k, v):
        self.check(layer, k, v)
        k, v = k.detach().clone(), v.detach().clone()
        if self.held[layer] is not None and self.count:
            k, v = (
                torch.cat([old[:, :, : self.count], new], dim=2)
                for old, new in zip(self.held[layer], (k, v), strict=True)
            )
        self.held[layer] = k, v
        if layer == self.n_layer - 1:
            self.count = k.shape[2]
        return k.clone(), v.clone()

    def crop(self, length):
        self.count = min(self.count, length)
        self.held = [
            pair and (pair[0][:, :, : self.count], pair[1][:, :, : self.count])
            for pair in self.held
        ]

    def select(self, rows):
        self.held = [pair and (pair[0][rows], pair[1][rows]) for pair in self.held]


class CountsAtTheFirstLayer(RightByCat):
    def update(self, layer, k, v):
        out = super().update(layer, k, v)
        if layer == 0:
            self.early = out[0].shape[2]
        return out

    @property
    def length(self):
        return getattr(self, "early", 0)


class CountFromTheKeysOfLayerZero(RightByCat):
    @property
    def length(self):
        return 0 if self.held[0] is None else self.held[0][0].shape[2]


class HalfPassKept(RightByCat):
    def update(self, layer, k, v):
        self.check(layer, k, v)
        k, v = k.detach().clone(), v.detach().clone()
        if self.held[layer] is not None:
            k = torch.cat([self.held[layer][0], k], dim=2)
            v = torch.cat([self.held[layer][1], v], dim=2)
        self.held[layer] = k, v
        if layer == self.n_layer - 1:
            self.count = k.shape[2]
        return k.clone(), v.clone()


class MaskFromTheCorner(RightByCat):
    def see(self, T):
        positions = torch.arange(self.count, self.count + T)
        return positions, torch.ones(T, self.count + T, dtype=torch.bool).tril()


class MaskWithoutItself(RightByCat):
    def see(self, T):
        positions, _ = super().see(T)
        return positions, torch.arange(self.count + T)[None] < positions[:, None]


class MaskTrueWhereHidden(RightByCat):
    def see(self, T):
        positions, mask = super().see(T)
        return positions, ~mask


class PositionsFromZero(RightByCat):
    def see(self, T):
        _, mask = super().see(T)
        return torch.arange(T), mask


class NegativeLayerAccepted(RightByCat):
    def check(self, layer, k, v):
        if layer >= self.n_layer:
            raise ValueError("layer")
        super().check(layer % self.n_layer, k, v)


class NewerTokensFirst(RightByCat):
    def update(self, layer, k, v):
        T = k.shape[2]
        k, v = super().update(layer, k, v)
        pair = k.roll(T, 2), v.roll(T, 2)
        self.held[layer] = pair
        return pair[0].clone(), pair[1].clone()


class AliasOfTheFirstTokens(RightByCat):
    def update(self, layer, k, v):
        out = super().update(layer, k, v)
        if out[0].shape[2] == k.shape[2]:
            self.held[layer] = k.detach(), v.detach()
        return out


class GraphKept(RightByCat):
    def update(self, layer, k, v):
        self.check(layer, k, v)
        k, v = k.clone(), v.clone()
        if self.held[layer] is not None:
            k = torch.cat([self.held[layer][0][:, :, : self.count], k], dim=2)
            v = torch.cat([self.held[layer][1][:, :, : self.count], v], dim=2)
        self.held[layer] = k, v
        if layer == self.n_layer - 1:
            self.count = k.shape[2]
        return k, v


class DtypeOfTheKeysOnly(RightByCat):
    def check(self, layer, k, v):
        super().check(layer, k, k)

    def update(self, layer, k, v):
        self.check(layer, k, v)
        return super().update(layer, k, v.to(k.dtype))


class CheckedAfterTheWrite(RightByCat):
    def update(self, layer, k, v):
        if layer not in range(self.n_layer):
            raise ValueError("layer")
        old = self.held[layer]
        try:
            return super().update(layer, k, v)
        except ValueError:
            self.held[layer] = None
            raise
        finally:
            self.old = old


class ResetForgetsOnlyTheCount(RightByCat):
    def reset(self):
        if not hasattr(self, "held"):
            super().reset()
        self.count = 0


class SelectOfTheFirstLayerOnly(RightByCat):
    def select(self, rows):
        if self.held[0] is not None:
            self.held[0] = self.held[0][0][rows], self.held[0][1][rows]


class SelectOfKeysOnly(RightByCat):
    def select(self, rows):
        self.held = [pair and (pair[0][rows], pair[1]) for pair in self.held]


class SelectByMask(RightByCat):
    def select(self, rows):
        def keep(x):
            mask = torch.zeros(x.shape[0], dtype=torch.bool)
            mask[rows] = True
            return x[mask]

        self.held = [pair and (keep(pair[0]), keep(pair[1])) for pair in self.held]


class CropCountsTokensToForget(RightByCat):
    def crop(self, length):
        super().crop(max(self.count - length, 0))


class SharedByAll(RightByCat):
    pairs: dict = {}  # noqa: RUF012

    @property
    def held(self):
        return [self.pairs.get(i) for i in range(self.n_layer)]

    @held.setter
    def held(self, value):
        for i, pair in enumerate(value):
            self.pairs[i] = pair

    def update(self, layer, k, v):
        self.check(layer, k, v)
        k, v = k.detach().clone(), v.detach().clone()
        if self.pairs.get(layer) is not None:
            k = torch.cat([self.pairs[layer][0][:, :, : self.count], k], dim=2)
            v = torch.cat([self.pairs[layer][1][:, :, : self.count], v], dim=2)
        self.pairs[layer] = k, v
        if layer == self.n_layer - 1:
            self.count = k.shape[2]
        return k.clone(), v.clone()


class LengthAsTensor(RightByCat):
    @property
    def length(self):
        return torch.tensor(self.count)


class RefusesLongerSeeOnly(RightByCat):
    def see(self, T):
        positions, mask = super().see(T)
        return positions.int(), mask


class ReturnsWhatItHolds(RightByCat):
    """Right as far as the text goes? What the caller does to the result is not said."""

    def update(self, layer, k, v):
        super().update(layer, k, v)
        return self.held[layer]


ANSWERS = {
    CountsAtTheFirstLayer: "length counts the tokens of the first layer, before the pass is done",
    CountFromTheKeysOfLayerZero: (
        "length counts the tokens of the first layer, before the pass is done"
    ),
    HalfPassKept: "tokens of a pass that stopped are kept",
    MaskFromTheCorner: "the mask is laid at the first key, not at the last",
    MaskWithoutItself: "a token does not see its own key",
    MaskTrueWhereHidden: "True where a key is hidden",
    PositionsFromZero: "the positions of each piece start at 0",
    NegativeLayerAccepted: "",
    NewerTokensFirst: "new pairs stand before the old ones",
    AliasOfTheFirstTokens: "the first piece is kept as it is, without a copy",
    GraphKept: "the graph of every pass is kept",
    DtypeOfTheKeysOnly: "",
    CheckedAfterTheWrite: "",
    ResetForgetsOnlyTheCount: "",
    SelectOfTheFirstLayerOnly: "",
    SelectOfKeysOnly: "",
    SelectByMask: "",
    CropCountsTokensToForget: "",
    SharedByAll: "",
    LengthAsTensor: "",
    RefusesLongerSeeOnly: "",
}
RIGHT = [RightByCat, ReturnsWhatItHolds]
SILENT = [CountsAtTheFirstLayer]
