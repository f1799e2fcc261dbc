"""What each kernel becomes on an architecture, as JSON.

    python tests/kernels/compile_kernels.py 80 86 90

Needs no GPU. :data:`LAUNCHES` calls the ordinary functions with tensors of real sizes; what they
would launch is compiled.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lm_from_scratch.attention.visibility import Visibility
from lm_from_scratch.kernels import matmul as kernels_matmul
from lm_from_scratch.kernels.adamw import adamw_
from lm_from_scratch.kernels.attention import flash_attention
from lm_from_scratch.kernels.compilation import compiled_for
from lm_from_scratch.kernels.decoding import decode_attention
from lm_from_scratch.kernels.galore import galore_step_
from lm_from_scratch.kernels.int8 import linear
from lm_from_scratch.kernels.loss import causal_lm_loss, chunked_causal_lm_loss
from lm_from_scratch.kernels.matmul import matmul
from lm_from_scratch.kernels.norm import rms_norm
from lm_from_scratch.kernels.paged import Paged, paged_attention, write_pages
from lm_from_scratch.kernels.rope import apply_rope, apply_rope_interleaved
from lm_from_scratch.kernels.softmax import softmax
from lm_from_scratch.kernels.swiglu import swiglu
from lm_from_scratch.weights.int8 import Int8Weight

ROOT = Path(__file__).resolve().parents[2]


def half(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """What a model on a GPU computes with. The sizes matter, the numbers do not."""
    return torch.zeros(shape, dtype=dtype, requires_grad=True)


def decode(
    n_head: int,
    n_kv_head: int,
    D: int,
    window: int | None = None,
    dense: bool = True,
    dtype: torch.dtype = torch.bfloat16,
) -> None:
    """One query in each of 8 rows, 4096 keys."""
    seen = torch.arange(4096)[None]
    visibility = Visibility(seen[:, -1:], seen, window=window, dense=dense)
    q, k = half(8, n_head, 1, D, dtype=dtype), half(8, n_kv_head, 4096, D, dtype=dtype)
    q, k = q.detach(), k.detach()
    decode_attention(q, k, k, visibility)


def decode_paged() -> None:
    """The same over pages of 16 slots, and the write of the last key."""
    keys, values = half(8192, 2, 64).detach(), half(8192, 2, 64).detach()
    k, q = half(8, 2, 1, 64).detach(), half(8, 14, 1, 64).detach()
    write_pages(k, k, keys, values, torch.zeros(8, 1, dtype=torch.long))
    table, lengths = (torch.zeros(shape, dtype=torch.int32) for shape in [(8, 256), (8,)])
    seen = torch.arange(4096)[None]
    paged = [Paged(memory, table, lengths, 16, 4096) for memory in (keys, values)]
    paged_attention(q, paged[0], paged[1], Visibility(seen[:, -1:], seen))


def flash(n_head: int, n_kv_head: int, D: int, packed: bool = False, masked: bool = False) -> None:
    """512 tokens: known to be whole; or several documents; or under a mask besides."""
    seen = torch.arange(512)[None]
    documents = seen // 100 if packed else None
    allowed = torch.ones(1, 1, 512, 512, dtype=torch.bool) if masked else None
    dense = not packed and not masked
    visibility = Visibility(seen, seen, documents, documents, dense=dense, allowed=allowed)
    q, k = half(1, n_head, 512, D), half(1, n_kv_head, 512, D)
    flash_attention(q, k, k, visibility).sum().backward()


def galore(
    m: int, n: int, bases: tuple[bool, bool], dtype: torch.dtype = torch.bfloat16, rank: int = 128
) -> None:
    """A step with a left, a right basis or both."""
    left, right = (torch.zeros(s, rank) if has else None for s, has in zip((m, n), bases))
    shape = (rank if bases[0] else m, rank if bases[1] else n)
    param, moment = half(m, n, dtype=dtype).detach(), torch.zeros(shape)
    galore_step_(param, param.clone(), left, right, moment, moment.clone(), 1)


def rope(turn: Callable[..., Tensor], H: int, D: int) -> None:
    """Heads as a projection leaves them."""
    angle = torch.zeros(1, 1, 512, D // 2)
    turn(half(2, 512, H, D).transpose(1, 2), angle, angle).sum().backward()


def adamw(dtype: torch.dtype, moments: torch.dtype = torch.float32) -> None:
    """A step of numbers that the host knows, and one of a tensor on the device."""
    param, m = torch.zeros(896, 4864, dtype=dtype), torch.zeros(896, 4864, dtype=moments)
    for step in (3, torch.tensor(3.0)):
        adamw_(param, param.clone(), m, m.clone(), step)


def ids(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.long)


def fused_loss(
    autocast: torch.dtype | None, dtype: torch.dtype = torch.bfloat16, C: int = 896
) -> None:
    """Few rows of the head: the products of backward are torch's, and are computed."""
    x, weight = half(1, 64, C, dtype=dtype), half(4096, C, dtype=dtype)
    with torch.autocast("cpu", autocast, enabled=autocast is not None):
        loss = chunked_causal_lm_loss(x, weight, ids(1, 64))
    loss.backward()


def product(M: int, K: int, N: int, dtype: torch.dtype = torch.bfloat16) -> None:
    y = matmul(half(M, K, dtype=dtype), half(K, N, dtype=dtype))
    y.backward(y.detach())


def int8(
    rows: int, groups: int, dtype: torch.dtype = torch.bfloat16, K: int = 896, N: int = 4864
) -> None:
    """A map of Qwen2-0.5B with 8-bit weights."""
    codes, scale = torch.zeros(N, K, dtype=torch.int8), torch.zeros(N, groups, dtype=dtype)
    weight = Int8Weight.wrap((N, K), K // groups, codes=codes, scale=scale)
    linear(half(rows, K, dtype=dtype).detach(), weight, torch.zeros(N, dtype=dtype))


#: A name, and a call with everything that follows from it. Sizes are those of Qwen2-0.5B, and some
#: that are multiples of nothing.
LAUNCHES: dict[str, Callable[[], Any]] = {
    "adamw": lambda: adamw(torch.float32),
    "adamw, bf16": lambda: adamw(torch.bfloat16, torch.bfloat16),
    "adamw, mixed": lambda: adamw(torch.bfloat16),
    "loss": lambda: causal_lm_loss(half(1, 64, 151936), ids(1, 64)).backward(),
    "loss, fused": lambda: fused_loss(None),
    "loss, fp32": lambda: fused_loss(None, torch.float32),
    "loss, autocast": lambda: fused_loss(torch.bfloat16, torch.float32),
    "loss, C = 1000": lambda: fused_loss(None, C=1000),
    "loss, C = 100": lambda: fused_loss(None, C=100),
    "loss, C = 65, autocast": lambda: fused_loss(torch.bfloat16, torch.float32, C=65),
    "decode": lambda: decode(14, 2, 64),
    "decode, window": lambda: decode(14, 2, 64, window=1024),
    "decode, mask": lambda: decode(14, 2, 64, dense=False),
    "decode, D = 128": lambda: decode(28, 4, 128),
    "decode, D = 256": lambda: decode(8, 1, 256),
    "decode, float32": lambda: [decode(32, 8, D, dtype=torch.float32) for D in (64, 128, 256)],
    "decode, 64 heads on 1": lambda: [
        decode(64, 1, D, dtype=dtype) for D, dtype in ((256, torch.bfloat16), (128, torch.float32))
    ],
    "decode, paged": decode_paged,
    "flash": lambda: flash(14, 2, 64),
    "flash, packed": lambda: flash(14, 2, 64, packed=True),
    "flash, mask": lambda: flash(14, 2, 64, masked=True),
    "flash, packed, mask": lambda: flash(14, 2, 64, packed=True, masked=True),
    "flash, D = 128": lambda: flash(28, 4, 128),
    "flash, D = 128, packed": lambda: flash(28, 4, 128, packed=True),
    "galore, left": lambda: galore(896, 4864, (True, False)),
    "galore, right": lambda: galore(4864, 896, (False, True)),
    "galore, both": lambda: galore(896, 896, (True, True), torch.float32),
    "galore, rank 1": lambda: galore(37, 21, (True, False), torch.float16, rank=1),
    "rope": lambda: rope(apply_rope, 14, 64),
    "rope, 2 heads": lambda: rope(apply_rope, 2, 64),
    "rope, D = 256": lambda: rope(apply_rope, 16, 256),
    "rope, D = 20": lambda: rope(apply_rope, 5, 20),
    "rope, interleaved": lambda: rope(apply_rope_interleaved, 14, 64),
    "rms_norm": lambda: rms_norm(half(64, 896), half(896)).sum().backward(),
    "rms_norm, wide": lambda: rms_norm(half(64, 8192), half(8192)).sum().backward(),
    "rms_norm, odd": lambda: rms_norm(half(65, 37), half(37)).sum().backward(),
    "softmax": lambda: softmax(half(64, 4096)).sum().backward(),
    "softmax, odd": lambda: softmax(half(64, 5001)).sum().backward(),
    "int8, 8 rows": lambda: int8(8, 1),
    "int8, 512 rows": lambda: int8(512, 1),
    "int8, groups of 64": lambda: [int8(rows, 14) for rows in (8, 512)],
    "int8, float32": lambda: [int8(rows, 1, torch.float32) for rows in (8, 512)],
    "int8, odd": lambda: [int8(rows, 1, K=895, N=4863) for rows in (8, 512)],
    "matmul": lambda: product(512, 896, 4864),
    "matmul, float32": lambda: product(512, 896, 4864, torch.float32),
    "matmul, vocabulary": lambda: product(1024, 768, 50257),
    "matmul, odd": lambda: [
        product(1000, 1001, 1003, dtype) for dtype in (torch.bfloat16, torch.float32)
    ],
    "matmul, tiny": lambda: product(17, 1, 5, torch.float16),
    "swiglu": lambda: swiglu(half(64, 4864), half(64, 4864)).sum().backward(),
}


def compiled_in_a_process(arch: int, limit: int, *options: str) -> None:
    """Compile the kernels in a process that does not interpret. Raises ``AssertionError`` for one
    that does not compile, does not fit into ``limit`` bytes of shared memory and 255 registers, or
    is never launched."""
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    paths = [str(ROOT), env.get("PYTHONPATH", "")]
    env["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    command = [sys.executable, __file__, str(arch), *options]
    run = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-3000:]
    print(run.stderr)
    rows = json.loads(run.stdout.splitlines()[-1])
    for row in rows:
        assert row["shared"] <= limit, row
        assert 0 < row["registers"] <= 255 and row["spills"] == 0, row
    if not options:
        assert {row["kernel"] for row in rows} == kernels_in_the_package()


def kernels_in_the_package() -> set[str]:
    """The functions under ``@triton.jit`` that are launched: their names end with ``_kernel``."""
    found = set()
    for path in (ROOT / "lm_from_scratch" / "kernels").glob("*.py"):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef) and node.name.endswith("_kernel"):
                found.add(node.name)
    return found


#: Mistakes in the sizes of a tile that the compiler alone sees.
BAD_TILES = {
    "a tile of K that matrix units do not take": {"BLOCK_K": 8},
    "more shared memory than there is": {"BLOCK_K": 64, "num_stages": 8},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("arches", nargs="+", type=int)
    parser.add_argument("--bad-tile", choices=BAD_TILES, help="put this mistake into matmul alone")
    options = parser.parse_args()
    launches = LAUNCHES
    if options.bad_tile:
        launches = {"matmul": LAUNCHES["matmul"]}
        for tile in kernels_matmul.TILES.values():
            tile |= BAD_TILES[options.bad_tile]
    rows = []
    for arch in options.arches:
        for launch, call in launches.items():
            start = time.perf_counter()
            with compiled_for(arch) as kernels:
                call()
            seconds = time.perf_counter() - start
            for kernel in {kernel.cubin: kernel for kernel in kernels}.values():
                rows.append(
                    dict(
                        launch=launch,
                        kernel=kernel.name,
                        arch=arch,
                        shared=kernel.shared,
                        registers=kernel.registers,
                        spills=kernel.spills,
                        seconds=round(seconds, 1),
                    )
                )
                line = (
                    "{launch:22}{kernel:32}sm_{arch:<4}{shared:7} B shared {registers:4} registers "
                    "{spills:4} B spilled {seconds:5} s"
                )
                print(line.format(**rows[-1]), file=sys.stderr)
    print(json.dumps(rows))


if __name__ == "__main__":
    main()
