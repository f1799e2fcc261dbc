"""Plant each of these mistakes in a copy of the kernels, and see which gate finds it.

    python tests/kernel_mutants.py          # a line for each; takes about ten minutes

Gates, in order of cost: the *values* that the interpreter computes, plainly; other *layouts* of
inputs and gradients; memory *poisoned* with NaN; and the *compiler*, for sm_80. The last kind of
mistake is one that only a run on a GPU can find: there must be no other that none of them finds.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
GATES = {
    "values": "values",
    "layouts": "values,layouts",
    "poison": "values,layouts,poison",
}
COMPILER, GPU = "compiler", "a GPU alone"
ORDER = [*GATES, COMPILER, GPU]

#: What is wrong, the file of kernels/, what stands there, what the mistake makes of it, and the
#: gate that finds it, or an earlier one: memory that was overwritten may crash the process.
MUTANTS = [
    ("a store without a mask", "swiglu",
     "tl.store(out + offsets, g * tl.sigmoid(g) * u, mask=inside)",
     "tl.store(out + offsets, g * tl.sigmoid(g) * u)", "poison"),
    ("no mask at all", "swiglu", "    inside = offsets < n\n    g =",
     "    inside = offsets > -1\n    g =", "poison"),
    ("a gradient taken as contiguous", "swiglu",
     "grad, gate, up = grad.contiguous(), gate.contiguous(), up.contiguous()",
     "gate, up = gate.contiguous(), up.contiguous()", "layouts"),
    ("padding with 0 instead of -inf", "softmax",
     'mask=inside, other=-float("inf")).to(tl.float32)\n        raised',
     "mask=inside, other=0.0).to(tl.float32)\n        raised", "values"),
    ("no rescaling at a new maximum", "softmax",
     "total = total * tl.exp(top - raised) + tl.sum", "total = total + tl.sum", "values"),
    ("the mean over the block, not the row", "norm",
     "tl.sum(value * value, axis=1) / width", "tl.sum(value * value, axis=1) / BLOCK", "values"),
    ("the last rows alone in the weight's gradient", "norm",
     "grad_w += tl.sum(dy * h, axis=0)", "grad_w = tl.sum(dy * h, axis=0)", "values"),
    ("a sum by Python", "norm", "dh = dy * w[None, :]\n        mean = tl.sum(dh * h, axis=1)",
     "dh = dy * w[None, :]\n        mean = sum([dh * h]).sum(1)", COMPILER),
    ("a rotation backwards", "rope", "        s = -s\n", "        s = s\n", "values"),
    ("strides of x taken for those of the result", "rope",
     "out += b * out_b + t * out_t + h * out_h", "out += b * x_b + t * x_t + h * x_d * HALF * 2",
     "layouts"),
    ("eps inside the root", "adamw", "(tl.sqrt(v / correction2) + eps)",
     "tl.sqrt(v / correction2 + eps)", "values"),
    ("half a tile of K without a mask", "matmul",
     "right = tl.load(b, mask=inside[:, None] & (columns < N), other=0.0)",
     "right = tl.load(b, mask=columns < N, other=0.0)", "poison"),
    ("a tile of K that matrix units do not take", "matmul", "BLOCK_K=32, num_warps=4, num_stages=4",
     "BLOCK_K=8, num_warps=4, num_stages=4", COMPILER),
    ("more shared memory than there is", "matmul", "BLOCK_K=32, num_warps=4, num_stages=4",
     "BLOCK_K=64, num_warps=4, num_stages=8", COMPILER),
    ("float32 products in tf32", "matmul", 'total, input_precision="ieee"', "total", GPU),
    ("one scale for every row of codes", "int8", "scale += columns * scale_n",
     "scale += columns * 0", "values"),
    ("tokens that do not count are counted", "loss",
     "if target == IGNORE:\n        return", "if target == IGNORE - 1:\n        return", "values"),
    ("a gradient written over the logits", "loss",
     "grad_logits = torch.empty_like(logits, memory_format=torch.contiguous_format)\n    logits,",
     "grad_logits = logits\n    logits,", "values"),
    ("the causal triangle from the first key", "attention", "query, key = S - T + t, s",
     "query, key = t, s", "values"),
    ("a hidden row divided by 0", "attention", "l = tl.where(l == 0, 1.0, l)", "l = l", "values"),
    ("the wrong key head", "attention",
     "k, k_strides, b, h // group, s, S, D, BLOCK_S, WIDE)\n            scores",
     "k, k_strides, b, h % 2, s, S, D, BLOCK_S, WIDE)\n            scores",
     "values"),
    ("values loaded without a mask", "attention",
     "inside = (row < n - start)[:, None] & (column < D)\n    return tl.load(x",
     "inside = (row < n)[:, None] & (column < D)\n    return tl.load(x", "poison"),
    ("splits merged without their weights", "decoding", "weight = tl.exp(L - tl.max(L, 0))",
     "weight = tl.where(split < splits, 1.0, 0.0)", "values"),
    ("keys behind the end of a page", "decoding", "visible = keys < stop",
     "visible = keys < tl.cdiv(stop, PAGE) * PAGE", "values"),
    ("the page's number taken for its slot", "decoding",
     "slots = page.to(tl.int64) * PAGE + keys % PAGE", "slots = page.to(tl.int64) + keys % PAGE",
     "values"),
]  # fmt: skip


def files_of(name: str) -> list[str]:
    """The tests of a file of kernels."""
    also = {"decoding": ["paged"], "matmul": ["galore"]}.get(name, [])
    return [f"tests/test_kernels_{stem}.py" for stem in (name, *also)]


def fails(root: Path, gates: str | None, *tests: str) -> str:
    """The first test that fails, or an empty string."""
    env = {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
    if gates is not None:
        env["KERNEL_GATES"] = gates
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests]
    done = subprocess.run(command, cwd=root, env=env, capture_output=True, text=True)
    if done.returncode == 0:
        return ""
    failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return failed[0].split()[1].partition("::")[2] if failed else "the process was killed"


def main() -> None:
    wrong = 0
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "copy"
        skip = shutil.ignore_patterns(".venv", ".git", "build", "_build", "auto_tutorials")
        shutil.copytree(ROOT, root, ignore=skip)
        for name, file, old, new, expected in MUTANTS:
            if sys.argv[1:] and file not in sys.argv[1:]:
                continue
            path = root / "lm_from_scratch" / "kernels" / f"{file}.py"
            text = path.read_text()
            path.write_text(text.replace(old, new))
            found, test = GPU, ""
            for gate, names in GATES.items():
                # of the layouts, plainly: none
                only = ["-k", "not strides and not operator"] * (gate == "values")
                if test := fails(root, names, *files_of(file), *only):
                    found = gate
                    break
            if found == GPU and (
                test := fails(root, None, "tests/test_kernels_compiled.py", "-k", "sm_80")
            ):
                found = COMPILER
            path.write_text(text)
            late = ORDER.index(found) > ORDER.index(expected)
            wrong += late
            row = {"mistake": name, "file": file, "found by": found, "test": test}
            print(json.dumps(row | ({"expected": expected} if late else {})), flush=True)
    sys.exit(wrong)


if __name__ == "__main__":
    main()
