"""Plant each of 24 classic mistakes in a copy of the package, and see which test finds it.

    python tests/mutants.py          # prints a line for each; takes some minutes

The mistakes are those that implementations of Qwen2 really had. Each line gives the error
of three plain checks (a full forward pass, a left-padded one, one that is fed 5, 1, 3, 3 tokens
through a cache) on a tiny model with large weights, and the first tests of the suite that fail. A
full forward pass sees no mistake of masks and caches: that is why there are three.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]

#: name, file, what stands there, and what the mistake makes of it
MUTANTS = [
    ("a query does not see itself", "visibility", "(key <= query)", "(key < query)"),
    (
        "triangle only, positions not compared", "visibility",
        "mask = (key >= 0) & (key <= query)",
        "mask = (key >= 0) & torch.ones(query.shape[2], key.shape[3]).tril().bool()",
    ),
    (
        "-inf by multiplication", "attention",
        "scores = scores.masked_fill(hidden, torch.finfo(work).min)",
        "scores = scores + hidden * -torch.inf",
    ),
    (
        "-inf by filling", "attention",
        "scores = scores.masked_fill(hidden, torch.finfo(work).min)\n"
        "    return torch.softmax(scores, dim=-1).masked_fill(hidden, 0.0).to(q.dtype)",
        "return torch.softmax(scores.masked_fill(hidden, -torch.inf), dim=-1).to(q.dtype)",
    ),
    ("padding inverted", "visibility", "(key >= 0) &", "(key < 0) &"),
    ("padding seen", "visibility", "(key >= 0) &", "(key >= -1) &"),
    ("positions restart after a cache", "cache/interface",
     "place(x, positions, start=self.dense_length or 0)", "place(x, positions, start=0)"),
    (
        "keys turned by local positions", "models/qwen2", "self.rotate(k, *rotation)",
        "self.rotate(k, *RotaryEmbedding(self.head_dim)(torch.arange(T)[None], x.dtype))",
    ),
    (
        "is_causal with a cache", "visibility",
        "self.hides_only_the_future and self.query_length == self.key_length",
        "self.hides_only_the_future",
    ),
    (
        "rotation backwards", "rope",
        "_check_angles(x, cos, sin)\n    a, b = x.to(", "sin = -sin\n    a, b = x.to(",
    ),
    (
        "rotation of interleaved pairs", "models/qwen2",
        "import RopeScaling, RotaryEmbedding, apply_rope",
        "import RopeScaling, RotaryEmbedding, apply_rope_interleaved as apply_rope",
    ),
    ("rotation of queries alone", "models/qwen2", ", self.rotate(k, *rotation)", ", k"),
    (
        "key heads tiled", "gqa", "x.repeat_interleave(n_head // x.shape[1], dim=1)",
        "x.repeat(1, n_head // x.shape[1], 1, 1)",
    ),
    ("no 1/sqrt(D)", "attention", "is_causal=visibility.is_causal,",
     "is_causal=visibility.is_causal, scale=1.0,"),
    ("1/sqrt(C)", "attention", "is_causal=visibility.is_causal,",
     "is_causal=visibility.is_causal, scale=(q.shape[1] * q.shape[3]) ** -0.5,"),
    ("softmax over the queries", "attention", "softmax(scores, dim=-1)", "softmax(scores, dim=-2)"),
    ("RMSNorm subtracts the mean", "norm", "        h = x.to(work)\n        norm",
     "        h = x.to(work) - x.to(work).mean(-1, keepdim=True)\n        norm"),
    ("RMSNorm sums", "norm", "norm.square() / x.shape[-1] + eps", "norm.square() + eps"),
    ("gate and up swapped", "activation", "self.product(self.gate_proj(x), self.up_proj(x))",
     "self.product(self.up_proj(x), self.gate_proj(x))"),
    (
        "norm after the sum", "models/qwen2",
        "x = x + self.self_attn(self.input_layernorm(x), rotation, visibility, cache)",
        "x = self.input_layernorm(x + self.self_attn(x, rotation, visibility, cache))",
    ),
    ("heads split without transpose", "models/qwen2",
     "q = self.q_proj(x).view(B, T, -1, self.head_dim).transpose(1, 2)",
     "q = self.q_proj(x).view(B, -1, T, self.head_dim)"),
    ("heads merged without transpose", "models/qwen2", "y.transpose(1, 2).reshape", "y.reshape"),
    ("no last norm", "models/qwen2", "return self.norm(x)", "return x"),
    ("eps outside the root", "norm", "torch.rsqrt(norm.square() / x.shape[-1] + eps)",
     "1 / (torch.sqrt(norm.square() / x.shape[-1]) + eps)"),
]  # fmt: skip

#: Two mistakes of the historic list have no counterpart: a mask one column too wide that was cut
#: to size later, and a triangle that was drawn for one query too. Masks here are made from
#: positions, in their exact size.

CHECKS = """
import json, sys, torch
sys.path.insert(0, "tests")
from tiny_models import tiny_qwen2, token_ids
from caches import in_chunks
from lm_from_scratch.attention.kinds import use_attention_
from lm_from_scratch.attention.visibility import positions_from_mask
torch.set_grad_enabled(False)
model, idx = tiny_qwen2(n_layer=4), token_ids(2, 12)
positions = positions_from_mask(torch.tensor([[0] * 5 + [1] * 7, [1] * 12]))
found = {}
for kind in ("formula", "sdpa"):
    use_attention_(model, kind)
    found["full " + kind] = model(idx)
    found["left " + kind] = model(idx, positions)[positions >= 0]
    found["cached " + kind] = in_chunks(idx, [5, 1, 3, 3], model=model)
torch.save(found, sys.argv[1])
"""

SUITE = [
    "-k", "not drawn_configs",  # random configurations take long to shrink
    "tests/test_qwen2.py", "tests/test_attention.py", "tests/test_norm.py", "tests/test_rope.py",
    "tests/test_activation.py",
]  # fmt: skip


def run(root: Path, *command: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, *command], cwd=root, env=env, capture_output=True, text=True, check=False
    )


def errors(root: Path) -> dict[str, object]:
    """The outputs of the three checks, or an empty dict if the code does not even run."""
    import torch

    out = root / "out.pt"
    out.unlink(missing_ok=True)
    run(root, "-c", CHECKS, str(out))
    return torch.load(out, weights_only=True) if out.exists() else {}


def main() -> None:
    import torch

    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "copy"
        skip = shutil.ignore_patterns(".venv", ".git", "build", "_build", "auto_tutorials")
        shutil.copytree(ROOT, root, ignore=skip)
        want = errors(root)
        rows, missed = [], 0
        for name, file, old, new in MUTANTS:
            path = root / "lm_from_scratch" / f"{file}.py"
            text = path.read_text()
            path.write_text(text.replace(old, new))
            got = errors(root)
            row = {"mutant": name}
            for check in ("full", "left", "cached"):
                worst = 0.0
                for kind in ("formula", "sdpa"):
                    key = f"{check} {kind}"
                    difference = (got[key] - want[key]).abs().max() if got else torch.tensor(9e9)
                    worst = max(worst, torch.nan_to_num(difference, nan=float("inf")).item())
                row[check] = "NaN" if worst == float("inf") else f"{worst:.1g}"
            done = run(root, "-m", "pytest", "-q", "--maxfail=3", "-p", "no:cacheprovider", *SUITE)
            failed = [
                line.split()[1].split("::")[1]
                for line in done.stdout.splitlines()
                if line.startswith("FAILED")
            ]
            row["caught by"] = ", ".join(failed) or "NOTHING"
            missed += not failed
            path.write_text(text)
            rows.append(row)
            print(json.dumps(row), flush=True)
    print(f"{len(rows) - missed} of {len(rows)} caught")
    sys.exit(missed)


if __name__ == "__main__":
    main()
