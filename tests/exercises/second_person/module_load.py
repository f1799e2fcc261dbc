"""Answers to module_load that were written from its text alone."""

import torch

from lm_from_scratch.exercises.source import load, stub

Coded = load(stub("module_load"), "<given code of module_load>")["Coded"]


class RightByTheTable(Coded):
    @classmethod
    def load(cls, param, other, assign):
        if isinstance(other, Coded):
            if assign:
                return cls.taken(other)
            if isinstance(param, Coded):
                return cls(other.codes.clone(), other.scale.to(param.dtype, copy=True))
            return other.dequantize().to(param.dtype)
        return cls.quantize(other if assign else other.detach().to(param.dtype))

    @classmethod
    def taken(cls, other):
        return cls(other.codes, other.scale)


class RightWithDetach(RightByTheTable):
    @classmethod
    def taken(cls, other):
        return other.detach()


class CheckpointItself(RightByTheTable):
    @classmethod
    def taken(cls, other):
        return other


class CopiedThoughAssigned(RightByTheTable):
    @classmethod
    def taken(cls, other):
        return cls(other.codes.clone(), other.scale.clone())


class AssignUnused(RightByTheTable):
    @classmethod
    def load(cls, param, other, assign):
        return super().load(param, other, False)


class ScaleSharedWhereTheDtypeAgrees(RightByTheTable):
    @classmethod
    def load(cls, param, other, assign):
        if isinstance(other, Coded) and isinstance(param, Coded) and not assign:
            return cls(other.codes.clone(), other.scale.to(param.dtype))
        return super().load(param, other, assign)


class CodesShared(RightByTheTable):
    @classmethod
    def load(cls, param, other, assign):
        if isinstance(other, Coded) and isinstance(param, Coded) and not assign:
            return cls(other.codes, other.scale.to(param.dtype, copy=True))
        return super().load(param, other, assign)


class DtypeOfTheCheckpoint(RightByTheTable):
    @classmethod
    def load(cls, param, other, assign):
        if isinstance(other, Coded) and isinstance(param, Coded) and not assign:
            return cls(other.codes.clone(), other.scale.clone())
        if not isinstance(other, Coded):
            return cls.quantize(other)
        return super().load(param, other, assign)


class QuantisedFirstThenConverted(RightByTheTable):
    @classmethod
    def load(cls, param, other, assign):
        if not isinstance(other, Coded) and not assign:
            made = cls.quantize(other)
            return cls(made.codes, made.scale.to(param.dtype))
        return super().load(param, other, assign)


class CodesMadeAnew(RightByTheTable):
    @classmethod
    def load(cls, param, other, assign):
        if isinstance(other, Coded) and isinstance(param, Coded) and not assign:
            return cls.quantize(other.dequantize().to(param.dtype))
        return super().load(param, other, assign)


class PlainModuleBecomesCoded(RightByTheTable):
    @classmethod
    def load(cls, param, other, assign):
        if not isinstance(param, Coded) and not assign:
            return cls(other.codes.clone(), other.scale.to(param.dtype, copy=True))
        return super().load(param, other, assign)


class PlainStaysPlainWhenAssigned(RightByTheTable):
    @classmethod
    def load(cls, param, other, assign):
        if not isinstance(param, Coded) and assign:
            return other.dequantize()
        return super().load(param, other, assign)


class MatrixInTheDtypeOfTheCheckpoint(RightByTheTable):
    @classmethod
    def load(cls, param, other, assign):
        if not isinstance(param, Coded) and not assign:
            return other.dequantize()
        return super().load(param, other, assign)


class CopiedIntoTheModule(RightByTheTable):
    @classmethod
    def load(cls, param, other, assign):
        if isinstance(param, Coded) and not assign:
            made = super().load(param, other, assign)
            param.codes.copy_(made.codes)
            param.scale.copy_(made.scale)
            return param
        return super().load(param, other, assign)


class ParamWithNewParts(RightByTheTable):
    @classmethod
    def load(cls, param, other, assign):
        made = super().load(param, other, assign)
        if isinstance(param, Coded):
            param.codes, param.scale = made.codes, made.scale
            return param
        return made


class PlainCheckpointAssignedAsItIs(RightByTheTable):
    @classmethod
    def load(cls, param, other, assign):
        if assign and not isinstance(other, Coded):
            return other.detach()
        return super().load(param, other, assign)


class AssignedInTheDtypeOfTheModule(RightByTheTable):
    @classmethod
    def load(cls, param, other, assign):
        if assign and not isinstance(other, Coded):
            return cls.quantize(other.detach().to(param.dtype))
        return super().load(param, other, assign)


class OnlyTheModuleIsLookedAt(RightByTheTable):
    @classmethod
    def load(cls, param, other, assign):
        if isinstance(param, Coded):
            matrix = other.dequantize() if isinstance(other, Coded) else other.detach()
            return cls.quantize(matrix if assign else matrix.to(param.dtype))
        return super().load(param, other, assign)


class SharedMatrixOfOnes(RightByTheTable):
    @classmethod
    def load(cls, param, other, assign):
        if not isinstance(other, Coded):
            x = other.detach().to(param.dtype) if not assign else other
            return cls(x.to(torch.int8), torch.ones(len(x), 1, dtype=x.dtype))
        return super().load(param, other, assign)


ANSWERS = {
    CheckpointItself: "",
    CopiedThoughAssigned: "assign=True makes a copy",
    AssignUnused: "assign is not used: all is as with assign=False",
    ScaleSharedWhereTheDtypeAgrees: (
        "the module's dtype without a copy: .to(dtype) may be the same tensor"
    ),
    CodesShared: "the codes are shared",
    DtypeOfTheCheckpoint: "the checkpoint's dtype without assign",
    QuantisedFirstThenConverted: "quantised first, and converted then",
    CodesMadeAnew: "codes are decoded and rounded a second time",
    PlainModuleBecomesCoded: "a plain module becomes quantised without assign",
    PlainStaysPlainWhenAssigned: "a plain module stays plain with assign",
    MatrixInTheDtypeOfTheCheckpoint: "a plain module gets the checkpoint's dtype without assign",
    CopiedIntoTheModule: "",
    ParamWithNewParts: "",
    PlainCheckpointAssignedAsItIs: (
        "assign=True takes a plain matrix as it is, and the module is no longer quantised"
    ),
    AssignedInTheDtypeOfTheModule: "the module's dtype even with assign",
    OnlyTheModuleIsLookedAt: "codes are decoded and rounded a second time",
    SharedMatrixOfOnes: "",
}
RIGHT = [RightByTheTable, RightWithDetach]
