"""Experts in published files: one tensor for each map of each expert there, stacked ones here.

=====================================  =================================================
in the file                            in the model
=====================================  =================================================
``experts.N.gate_proj.weight`` (F, C)  rows 0 to F of ``experts.gate_up_proj[N]`` (2F, C)
``experts.N.up_proj.weight`` (F, C)    rows F to 2F of it
``experts.N.down_proj.weight`` (C, F)  ``experts.down_proj[N]``
=====================================  =================================================

A file may hold the stacked form instead. Any family with experts has these names; but where
experts have biases, ``experts.gate_up_proj_bias`` (E, 2F), as in gpt-oss, both forms are stacked.
And there a tensor ``NAME`` (E, K, N) may be in four bits: ``NAME_blocks`` (E, N, K / 32, 16) and
``NAME_scales`` (E, N, K / 32), of :mod:`~lm_from_scratch.weights.float4`, an output to a row.
"""

import re
from collections import defaultdict
from collections.abc import Mapping

import torch
from torch import Tensor

from lm_from_scratch.weights.float4 import MXFP4, decode_mxfp4

#: The name of one map of one expert.
ONE = re.compile(r"^(.*\bexperts)\.(\d+)\.(gate_proj|up_proj|down_proj)\.weight$")

#: The name of all experts of a layer.
ALL = re.compile(r"^(.*\bexperts)\.(gate_up_proj|down_proj)$")

MAPS = ("gate_proj", "up_proj", "down_proj")


def stacked(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The same weights, with the experts of each layer in two tensors.

    Raises ``ValueError`` for an expert that is missing, and for one of another shape or dtype.
    """
    result: dict[str, Tensor] = {}
    layers: dict[str, dict[str, Tensor]] = defaultdict(dict)
    for name, tensor in tensors.items():
        if match := ONE.match(name):
            layers[match[1]][f"{match[2]}.{match[3]}"] = tensor
        else:
            result[name] = tensor
    for layer, maps in layers.items():
        E = 1 + max(int(name.partition(".")[0]) for name in maps)
        if len(maps) != E * len(MAPS):  # counted first: a number may be as high as it likes
            lacks = next(n for e in range(E) for m in MAPS if (n := f"{e}.{m}") not in maps)
            raise ValueError(f"{layer}.{lacks}.weight is missing, beside {layer}.{E - 1}")
        for m in MAPS:
            first = maps[f"0.{m}"]
            for e in range(E):
                one = maps[f"{e}.{m}"]
                if one.shape != first.shape or one.dtype != first.dtype or one.dim() != 2:
                    raise ValueError(
                        f"{layer}.{e}.{m}.weight is {one.dtype} {tuple(one.shape)}, that of expert "
                        f"0 is {first.dtype} {tuple(first.shape)}"
                    )
        F, C = maps["0.gate_proj"].shape
        if maps["0.up_proj"].shape != (F, C):
            shape = tuple(maps["0.up_proj"].shape)
            raise ValueError(f"{layer}: gate_proj has shape {(F, C)}, up_proj {shape}")
        gate_up = maps["0.gate_proj"].new_empty(E, 2 * F, C)
        for e in range(E):
            gate_up[e, :F], gate_up[e, F:] = maps[f"{e}.gate_proj"], maps[f"{e}.up_proj"]
        result[f"{layer}.gate_up_proj"] = gate_up
        result[f"{layer}.down_proj"] = torch.stack([maps[f"{e}.down_proj"] for e in range(E)])
    return result


def unpacked(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The same weights, with those in MXFP4 as numbers in bfloat16, which can say each exactly.
    Raises ``ValueError`` for blocks that have no scales that fit, for what is there in both forms,
    and for numbers that are not finite."""
    result: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        base, suffix = name[:-7], name[-7:]
        if suffix == "_blocks":
            scales = tensors.get(f"{base}_scales", torch.empty(0))
            fits = tensor.dim() > 2 and tensor.shape == (*scales.shape, 16)
            if not fits or {tensor.dtype, scales.dtype} != {torch.uint8}:
                raise ValueError(
                    f"{name} is {tensor.dtype} {tuple(tensor.shape)}, {base}_scales {scales.dtype} "
                    f"{tuple(scales.shape)}: for each 16 bytes of blocks a byte of scales is needed"
                )
            if base in tensors:
                raise ValueError(f"{base} is there twice, as numbers and in four bits")
            numbers = decode_mxfp4(MXFP4(tensor.flatten(-2), scales), torch.bfloat16)
            if (scales > 252).any() and not numbers.isfinite().all():
                raise ValueError(f"{base}_scales has exponents whose numbers are not finite")
            result[base] = numbers.mT.contiguous()
        elif suffix != "_scales" or f"{base}_blocks" not in tensors:
            result[name] = tensor
    return result


def unstacked(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The same weights with each expert by itself, as those without biases are published: views, no
    copies."""
    result: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        match = ALL.match(name)
        if not match or f"{name}_bias" in tensors:
            result[name] = tensor
            continue
        for e, one in enumerate(tensor):
            parts = [one] if match[2] == "down_proj" else one.chunk(2)
            maps = ["down_proj"] if match[2] == "down_proj" else ["gate_proj", "up_proj"]
            for m, part in zip(maps, parts, strict=True):
                result[f"{match[1]}.{e}.{m}.weight"] = part
    return result
