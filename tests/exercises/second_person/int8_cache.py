"""Answers to int8_cache that were written from its text alone."""

import torch


class RightByReshape:
    def __init__(self, group=32):
        self.group = group

    def groups(self, x):
        D = x.shape[-1]
        N = min(self.group, D)
        if D % N:
            raise ValueError(f"{D} features in groups of {N}")
        return x.reshape(*x.shape[:-1], D // N, N)

    def wide(self, x):
        return x.to(torch.promote_types(x.dtype, torch.float32))

    def encode(self, x):
        low, step, g = self.ruler(x)
        return self.codes(g, self.wide(low), self.wide(step)), low, step

    def ruler(self, x):
        g = self.wide(self.groups(x))
        low, high = g.amin(-1, keepdim=True), g.amax(-1, keepdim=True)
        return low.to(x.dtype), ((high - low) / 255).to(x.dtype), g

    def codes(self, g, low, step):
        codes = ((g - low) / step).round().clamp(0, 255)
        return torch.where(step == 0, 0, codes).to(torch.uint8)

    def decode(self, parts):
        codes, low, step = parts
        x = self.wide(low) + self.wide(step) * codes.to(self.wide(step).dtype)
        return x.flatten(-2).to(low.dtype)


class RightByQuotient(RightByReshape):
    def codes(self, g, low, step):
        safe = torch.where(step > 0, step, torch.ones_like(step))
        codes = ((g - low) / safe).round() * (step > 0)
        return codes.clamp(max=255).byte()


class StepBeforeItIsRounded(RightByReshape):
    def encode(self, x):
        low, step, g = self.ruler(x)
        exact = (g.amax(-1, keepdim=True) - g.amin(-1, keepdim=True)) / 255
        return self.codes(g, self.wide(low), exact), low, step


class DividedBy256(RightByReshape):
    def ruler(self, x):
        low, _step, g = super().ruler(x)
        return low, ((g.amax(-1, keepdim=True) - g.amin(-1, keepdim=True)) / 256).to(x.dtype), g


class CutNotRounded(RightByReshape):
    def codes(self, g, low, step):
        codes = ((g - low) / step).clamp(0, 255)
        return torch.where(step == 0, 0, codes).to(torch.uint8)


class CodesWrapAround(RightByReshape):
    def codes(self, g, low, step):
        codes = ((g - low) / step).round()
        return torch.where(step == 0, 0, codes).to(torch.int64).to(torch.uint8)


class NotANumberForEqualOnes(RightByReshape):
    def codes(self, g, low, step):
        return ((g - low) / step).round().clamp(0, 255).to(torch.uint8)


class StepNotBelowEps(RightByReshape):
    def ruler(self, x):
        low, step, g = super().ruler(x)
        return low, step.clamp(min=1e-8), g


class EpsAddedToTheStep(RightByReshape):
    def codes(self, g, low, step):
        return ((g - low) / (step + 1e-8)).round().clamp(0, 255).to(torch.uint8)


class NarrowArithmetic(RightByReshape):
    def wide(self, x):
        return x


class AlwaysFloat32(RightByReshape):
    def wide(self, x):
        return x.float()


class ProductRoundedFirst(RightByReshape):
    def decode(self, parts):
        codes, low, step = parts
        return (low + step * codes).flatten(-2)


class SymmetricRuler(RightByReshape):
    def encode(self, x):
        g = self.wide(self.groups(x))
        step = (g.abs().amax(-1, keepdim=True) / 127).to(x.dtype)
        codes = (g / self.wide(step)).round().clamp(-127, 127) + 128
        return codes.to(torch.uint8), -128 * step, step


class OneRulerForTheHead(RightByReshape):
    def ruler(self, x):
        low, _step, g = super().ruler(x)
        lowest = g.amin((-2, -1), keepdim=True).expand(low.shape)
        highest = g.amax((-2, -1), keepdim=True).expand(low.shape)
        return lowest.to(x.dtype), ((highest - lowest) / 255).to(x.dtype), g


class RemainderDropped(RightByReshape):
    def groups(self, x):
        N = min(self.group, x.shape[-1])
        G = x.shape[-1] // N
        return x[..., : G * N].reshape(*x.shape[:-1], G, N)


class EveryGthFeature(RightByReshape):
    def groups(self, x):
        g = super().groups(x)
        return g.flatten(-2).unflatten(-1, (g.shape[-1], g.shape[-2])).mT

    def decode(self, parts):
        codes, low, step = parts
        x = self.wide(low) + self.wide(step) * codes
        return x.mT.flatten(-2).to(low.dtype)


class GroupsAcrossTokens(RightByReshape):
    def groups(self, x):
        g = super().groups(x)
        return x.mT.reshape(g.shape)


class FewFeaturesRefused(RightByReshape):
    def groups(self, x):
        if x.shape[-1] % self.group:
            raise ValueError("group")
        return super().groups(x)


class RightByView(RightByReshape):
    def groups(self, x):
        N = min(self.group, x.shape[-1])
        if x.shape[-1] % N:
            raise ValueError("group")
        return x.view(*x.shape[:-1], x.shape[-1] // N, N)


class GroupOf64(RightByReshape):
    def __init__(self, group=64):
        super().__init__(group)


class DecodedInFloat32(RightByReshape):
    def decode(self, parts):
        codes, low, step = parts
        return (low.float() + step.float() * codes).flatten(-2)


class MinimumAsInt8(RightByReshape):
    def encode(self, x):
        codes, low, step = super().encode(x)
        return (codes.to(torch.int16) - 128).to(torch.int8), low, step

    def decode(self, parts):
        codes, low, step = parts
        return super().decode((codes.to(torch.int16) + 128, low, step))


class ShiftedInPlace(RightByReshape):
    def encode(self, x):
        low, step, g = self.ruler(x)
        g -= low
        return self.codes(g, 0 * self.wide(low), self.wide(step)), low, step


class MinimumFromTheWholeTensor(RightByReshape):
    def ruler(self, x):
        g = self.wide(self.groups(x))
        low = g.min() * torch.ones_like(g[..., :1])
        return low.to(x.dtype), ((g.max() - low) / 255).to(x.dtype), g


ANSWERS = {
    StepBeforeItIsRounded: "codes are counted in the step before it is rounded",
    DividedBy256: "256 steps from the smallest to the largest number, not 255",
    CutNotRounded: "codes are cut off, not rounded",
    CodesWrapAround: "a code of 256 becomes 0",
    NotANumberForEqualOnes: "a group of equal numbers is divided by 0",
    StepNotBelowEps: "",
    EpsAddedToTheStep: "a small constant is added to the step",
    NarrowArithmetic: "the range is computed in half precision",
    AlwaysFloat32: "float64 is computed in float32",
    ProductRoundedFirst: "decode computes in half precision",
    SymmetricRuler: "",
    OneRulerForTheHead: "one ruler for all groups of a head",
    RemainderDropped: "features that do not fit into whole groups are not refused",
    EveryGthFeature: "every fourth feature is a group, not four neighbours",
    GroupsAcrossTokens: "",
    FewFeaturesRefused: "",
    GroupOf64: "another group than 32 by default",
    DecodedInFloat32: "decode returns float32",
    MinimumAsInt8: "",
    ShiftedInPlace: "",
    MinimumFromTheWholeTensor: "one ruler for the whole tensor",
}
RIGHT = [RightByReshape, RightByQuotient, RightByView]
