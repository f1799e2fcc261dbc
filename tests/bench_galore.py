"""GaLore beside galore-torch and pytorch_optimizer: ``make bench``.

Five parts: which shapes, ranks and dtypes each implementation can update at all, and whether the
result is the closed form; seconds of a step, between two bases and with a new one; how much of a
real gradient's energy the cheaper bases keep; bytes of state; and the most memory that one training
step takes. The model is the 60M configuration of the paper (58 M parameters, 56 projected matrices,
rank 128), with gradients of real text.

The peers take part if they are installed:
``pip install --no-deps galore-torch==1.0 pytorch_optimizer==4.1.0``.
"""

import argparse
import importlib.machinery
import importlib.util
import itertools
import json
import platform
import statistics
import subprocess
import sys
import time
import types
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from bench_qwen2 import peak_megabytes
from torch import Tensor, nn

from lm_from_scratch.data import reference
from lm_from_scratch.loss import causal_lm_loss
from lm_from_scratch.models.qwen2 import Qwen2Config, Qwen2ForCausalLM
from lm_from_scratch.onednn import onednn_matmul
from lm_from_scratch.optim import AdamW, GaLore, update_in_backward
from lm_from_scratch.optim.galore import (
    captured_energy,
    project,
    project_back,
    sides,
    singular_basis,
)
from lm_from_scratch.tokenizer import Tokenizer

RANK, GAP, SCALE = 128, 200, 0.25
SIXTY_M = dict(
    vocab_size=32000, block_size=256, n_layer=8, n_head=8, n_kv_head=8, n_embd=512,
    intermediate_size=1376, tie_word_embeddings=False, eos_token_id=None,
)  # fmt: skip


def peers() -> dict[str, Any]:
    """The optimizer classes that are installed."""
    found: dict[str, Any] = {"ours": GaLore}
    if importlib.util.find_spec("bitsandbytes") is None:  # galore-torch imports it for its 8 bits
        names = ("bitsandbytes", "bitsandbytes.optim", "bitsandbytes.optim.optimizer")
        modules = {name: types.ModuleType(name) for name in names}
        for name, module in modules.items():
            module.__spec__ = importlib.machinery.ModuleSpec(name, None)
        modules[names[-1]].Optimizer2State = object  # type: ignore[attr-defined]
        sys.modules.update(modules)
    for name, module, attribute in (
        ("galore-torch 1.0", "galore_torch", "GaLoreAdamW"),
        ("pytorch_optimizer 4.1", "pytorch_optimizer", "GaLore"),
    ):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                found[name] = getattr(importlib.import_module(module), attribute)
        except ImportError:
            print(f"{name} is not installed, and takes no part")
    return found


def build(
    name: str, kind: Any, matrices: list[Tensor], others: list[Tensor], group: dict[str, Any],
    **options: Any,
) -> Any:  # fmt: skip
    """An optimizer of one implementation; galore-torch has a name of its own for the type."""
    if name == "galore-torch 1.0":
        group = {"proj_type" if k == "projection_type" else k: v for k, v in group.items()}
        options["no_deprecation_warning"] = True
    groups = [{"params": matrices, **group}] + ([{"params": others}] if others else [])
    return kind(groups, weight_decay=0.0, eps=1e-8, lr=1e-3, **options)


# ------------------------------------------------------------------ 1. what works, and is right


def correctness(kinds: dict[str, Any]) -> dict[str, dict[str, str]]:
    """Two steps on one basis against the closed form, for each shape, rank, type and dtype."""
    report: dict[str, dict[str, str]] = {}
    shapes = {"tall": (24, 10), "wide": (10, 24), "square": (16, 16)}
    types_ = ("std", "reverse_std", "left", "right", "full", "random")
    for name, kind in kinds.items():
        for type_, (shape_name, shape) in itertools.product(types_, shapes.items()):
            for rank, dtype in itertools.product(
                (1, 4, min(shape)), (torch.float32, torch.float64, torch.bfloat16)
            ):
                key = f"{type_}, {shape_name}, rank {rank}, {str(dtype)[6:]}"
                try:
                    report.setdefault(key, {})[name] = verdict(
                        name, kind, shape, type_, rank, dtype
                    )
                except Exception as error:
                    report[key][name] = f"{type(error).__name__}: {str(error).splitlines()[0]}"
    return report


def verdict(
    name: str, kind: Any, shape: tuple[int, int], type_: str, rank: int, dtype: torch.dtype
) -> str:
    """``ok``, or by how much the second step differs from the closed form."""
    generator = torch.Generator().manual_seed(0)
    p = nn.Parameter(torch.zeros(shape, dtype=dtype))
    grads = [torch.randn(shape, generator=generator).to(dtype) for _ in range(2)]
    group = dict(rank=rank, update_proj_gap=10**9, scale=1.0, projection_type=type_)
    extra = {"basis": "svd"} if name == "ours" else {}
    optimizer = build(name, kind, [p], [], group, **extra)
    steps = []
    for grad in grads:
        before = p.detach().double().clone()
        p.grad = grad.clone()
        optimizer.step()
        steps.append(p.detach().double() - before)
    if type_ == "random" and rank == min(shape):  # every basis spans all: nothing to compare
        return "ok" if all(step.isfinite().all() and step.any() for step in steps) else "no step"
    if type_ == "random":  # any orthonormal basis will do: the second step lies in the first's span
        rows, columns = sides(shape, type_)
        u, s, vh = torch.linalg.svd(steps[0])
        span = int((s > 1e-2 * s[0]).sum())
        outside = steps[1] - (u[:, :span] @ u[:, :span].mT @ steps[1] if rows
                              else steps[1] @ vh[:span].mT @ vh[:span])  # fmt: skip
        error = outside.norm() / steps[1].norm()
        u0, _, v0 = torch.linalg.svd(grads[0].double())
        same = project(
            steps[0], *(u0[:, :rank] if rows else None, v0[:rank].mT if columns else None)
        )
        if (1 - same.square().sum() / steps[0].square().sum()) < 1e-3:
            return "the basis is that of std"
        return "ok" if error < 2e-2 and span <= rank else f"off by {error:.1e}"
    u, _, vh = torch.linalg.svd(grads[0].double(), full_matrices=False)
    rows, columns = sides(shape, type_)
    left, right = u[:, :rank] if rows else None, vh[:rank].mT if columns else None
    low = [project(grad.double(), left, right) for grad in grads]
    m = 0.1 * (0.9 * low[0] + low[1]) / (1 - 0.9**2)
    v = 0.001 * (0.999 * low[0].square() + low[1].square()) / (1 - 0.999**2)
    want = project_back(m / v.sqrt(), left, right)
    error = (steps[1] + 1e-3 * want).norm() / (1e-3 * want).norm()
    bound = {torch.float32: 1e-3, torch.float64: 1e-3, torch.bfloat16: 6e-2}[dtype]
    return "ok" if error < bound else f"off by {error:.1e}"


# ------------------------------------------------------------------------------- 2. and 3. time


def real_gradients(steps: int) -> tuple[Qwen2ForCausalLM, list[dict[str, Tensor]]]:
    """The 60M model and its gradients at the first and the last of ``steps`` training steps."""
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(Qwen2Config(**SIXTY_M))  # type: ignore[arg-type]
    texts = [document.text for document in reference()]
    tokenizer = Tokenizer.train(texts, 4096)
    ids = torch.tensor([token for text in texts for token in tokenizer.encode(text)])
    optimizer = AdamW(model.parameters(), lr=1e-3, fused=True)
    kept = []
    for step in range(steps):
        start = step * 1024
        rows = ids[start : start + 1028].view(4, 257)
        optimizer.zero_grad()
        causal_lm_loss(model(rows[:, :-1]), rows[:, 1:]).backward()
        if step in (0, steps // 2, steps - 1):
            kept.append({n: p.grad.clone() for n, p in model.named_parameters()})  # type: ignore
        optimizer.step()
    return model, kept


def matrices_of(model: Qwen2ForCausalLM) -> list[str]:
    """The names of the projected weights: attention and MLP."""
    return [n for n, p in model.named_parameters() if "layers" in n and p.dim() == 2]


def step_times(
    kinds: dict[str, Any], model: Qwen2ForCausalLM, grads: dict[str, Tensor], rounds: int
) -> dict[str, Any]:
    """Seconds of a step of the whole model and of its matrices, steady and with a new basis."""
    names = matrices_of(model)
    made: dict[str, Callable[[], None]] = {}
    refresh: dict[str, Callable[[], None]] = {}
    group = dict(rank=RANK, update_proj_gap=GAP, scale=SCALE, projection_type="std")
    for part, chosen in (("whole", list(grads)), ("matrices", names)):
        variants: list[tuple[str, str, Any, dict[str, Any]]] = [
            (name, name, kind, {}) for name, kind in kinds.items() if name != "ours"
        ]
        for basis in ("svd", "gram", "subspace"):
            variants.append((f"ours, {basis}", "ours", GaLore, {"basis": basis, "fused": True}))
            if basis != "svd":  # which has no product
                options = {"basis": basis, "fused": True}
                variants.append((f"ours, {basis}, oneDNN", "ours", GaLore, options))
        variants.append(("fused AdamW", "adamw", AdamW, {"fused": True}))
        for label, name, kind, options in variants:
            params = {n: nn.Parameter(grads[n].clone()) for n in chosen}
            for n, p in params.items():
                p.grad = grads[n]
            matrices = [params[n] for n in names]
            others = [p for n, p in params.items() if n not in names]
            if name == "adamw":
                optimizer = AdamW(params.values(), fused=True)
            else:
                optimizer = build(name, kind, matrices, others, group, **options)
            if "oneDNN" in label:
                optimizer.matmul = onednn_matmul
            made[f"{part}: {label}"] = optimizer.step
            if name != "adamw" and part == "matrices":
                refresh[label] = renewal(name, optimizer)
    seconds: dict[str, list[float]] = {label: [] for label in made}
    for number in range(rounds + 1):
        for label, step in made.items():
            start = time.perf_counter()
            step()
            if number:
                seconds[label].append(time.perf_counter() - start)
    news: dict[str, list[float]] = {label: [] for label in refresh}
    for _ in range(3):
        for label, renew in refresh.items():
            start = time.perf_counter()
            renew()
            news[label].append(time.perf_counter() - start)
    report: dict[str, Any] = {}
    peer = "galore-torch 1.0" if "galore-torch 1.0" in kinds else "ours, svd"
    for label, times in seconds.items():
        base = seconds[f"{label.split(':')[0]}: {peer}"]
        report[f"steady step, {label}"] = row(times, base, peer)
    for label, times in news.items():
        report[f"new bases, {label}"] = row(times, news[peer], peer)
    if peer in news:
        whole = statistics.median(seconds[f"whole: {peer}"])
        theirs = whole + statistics.median(news[peer]) / GAP
        for label in news:
            ours = statistics.median(seconds[f"whole: {label}"])
            ours += statistics.median(news[label]) / GAP
            report[f"amortised over {GAP} steps, {label}"] = {
                f"over {peer}": round(theirs / ours, 2)
            }
    return report


def renewal(name: str, optimizer: Any) -> Callable[[], None]:
    """Make all bases anew, as the optimizer does when they are due, and nothing else."""
    params = [p for group in optimizer.param_groups for p in group["params"]]

    def renew() -> None:
        for p in params:
            state = optimizer.state[p]
            if name == "ours":
                optimizer.make_basis(p, p.grad, optimizer.param_groups[0])
            else:
                projector = state["projector"]
                side = "right" if p.shape[0] >= p.shape[1] else "left"
                arguments = (RANK, side) if name == "galore-torch 1.0" else (side,)
                made = projector.get_orthogonal_matrix(p.grad, *arguments)
                projector.ortho_matrix = made

    return renew


def row(times: list[float], base: list[float], peer: str) -> dict[str, float]:
    ratios = [b / a for a, b in zip(times, base, strict=True)]
    return {
        "ms": round(1000 * statistics.median(times), 1),
        f"over {peer}": round(statistics.median(ratios), 2),
        "from": round(min(ratios), 2),
        "to": round(max(ratios), 2),
    }


def energies(model: Qwen2ForCausalLM, kept: list[dict[str, Tensor]]) -> dict[str, Any]:
    """Shares of the last gradient's best energy that cheaper bases keep: least and median."""
    shares: dict[str, list[float]] = {}
    for n in matrices_of(model):
        old, grad = kept[1][n], kept[-1][n]
        left, right = sides((grad.shape[0], grad.shape[1]), "std")
        exact = singular_basis(grad, RANK, left, right, "svd")
        stale = singular_basis(old, RANK, left, right, "svd")
        best = captured_energy(project(grad, *exact), grad)
        for name, basis in (
            ("stale", stale),
            ("gram", singular_basis(grad, RANK, left, right, "gram")),
            ("subspace", singular_basis(grad, RANK, left, right, "subspace", stale)),
        ):
            share = captured_energy(project(grad, *basis), grad) / best
            shares.setdefault(name, []).append(share.item())
        shares.setdefault("of the whole gradient", []).append(best.item())
    return {
        f"energy, {name}": {
            "least": round(min(values), 5), "median": round(statistics.median(values), 5)
        }
        for name, values in shares.items()
    }  # fmt: skip


# ------------------------------------------------------------------------------ 4. and 5. memory


def held(optimizer: torch.optim.Optimizer) -> int:
    """Bytes of the memory that the optimizer's state keeps alive, however small a view of it."""
    seen: dict[int, int] = {}

    def walk(value: Any) -> None:
        if isinstance(value, Tensor):
            storage = value.untyped_storage()
            seen[storage.data_ptr()] = storage.nbytes()
        elif hasattr(value, "__dict__"):
            walk(list(vars(value).values()))
        elif isinstance(value, (list, tuple)):
            for part in value:
                walk(part)
        elif isinstance(value, dict):
            walk(list(value.values()))

    walk(dict(optimizer.state))
    return sum(seen.values())


KINDS_OF_STEP = ("AdamW", "GaLore", "AdamW in backward", "GaLore in backward")


def memory_of(kind: str) -> int:
    """MB that a process of its own grows by in three training steps, weights not counted."""
    code = f"from bench_galore import grow; grow({kind!r})"
    found = subprocess.run(
        [sys.executable, "-c", code], cwd=Path(__file__).parent, capture_output=True, text=True,
        check=True,
    )  # fmt: skip
    return int(found.stdout.split()[-1])


def grow(kind: str) -> None:
    model = Qwen2ForCausalLM(Qwen2Config(**SIXTY_M))  # type: ignore[arg-type]
    names = matrices_of(model)
    idx = torch.randint(0, 32000, (1, 64))
    before = peak_megabytes()
    params = dict(model.named_parameters())
    others = [p for n, p in params.items() if n not in names]
    optimizer: AdamW
    if kind.startswith("GaLore"):
        matrices = {"params": [params[n] for n in names], "rank": RANK}
        optimizer = GaLore([matrices, {"params": others}], fused=True)
    else:
        optimizer = AdamW(params.values(), fused=True)

    def steps() -> None:
        for _ in range(3):
            causal_lm_loss(model(idx), idx).backward()
            optimizer.step()
            optimizer.zero_grad()

    if "backward" in kind:
        with update_in_backward(optimizer):
            steps()
    else:
        steps()
    print(peak_megabytes() - before)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7, help="steps of each; default 7")
    parser.add_argument("--stale", type=int, default=12, help="training steps; default 12")
    parser.add_argument("--out", default="build/bench/galore.json")
    args = parser.parse_args()
    out = Path(args.out)
    out.parent.mkdir(parents=True, exist_ok=True)
    kinds = peers()
    machine = f"{platform.machine()}, {torch.get_num_threads()} thread(s)"
    report: dict[str, Any] = {"machine": machine, "torch": torch.__version__}

    table = report["correctness"] = correctness(kinds)
    print(f"\n{len(table)} combinations of type, shape, rank and dtype; what is not ok:")
    for name in kinds:
        wrong = {key: row_[name] for key, row_ in table.items() if row_[name] != "ok"}
        print(f"  {name}: {len(wrong)}")
        for key, text in wrong.items():
            print(f"    {key}: {text[:90]}")

    model, kept = real_gradients(args.stale)
    for name, part in (
        ("time", step_times(kinds, model, kept[-1], args.rounds)),
        ("energy", energies(model, kept)),
    ):
        report[name] = part
        print()
        for label, values in part.items():
            print(f"  {label:45}" + ", ".join(f"{k} {v}" for k, v in values.items()))

    names = matrices_of(model)
    group = dict(rank=RANK, update_proj_gap=GAP, scale=SCALE, projection_type="std")
    print("\nmegabytes of state")
    report["state"] = {}
    for name, kind in {"AdamW": AdamW, **kinds}.items():
        params = {n: nn.Parameter(g.clone()) for n, g in kept[-1].items()}
        for n, p in params.items():
            p.grad = kept[-1][n]
        others = [p for n, p in params.items() if n not in names]
        matrices = [params[n] for n in names]
        own = {} if name == "AdamW" else group
        optimizer = build(name, kind, matrices, others, own)
        optimizer.step()
        report["state"][name] = round(held(optimizer) / 1e6, 1)
        print(f"  {name:25}{report['state'][name]}")
    print("\nmegabytes that three training steps of one row of 64 tokens add to the weights")
    report["memory"] = {}
    for kind_of_step in KINDS_OF_STEP:
        report["memory"][kind_of_step] = memory_of(kind_of_step)
        print(f"  {kind_of_step:25}{report['memory'][kind_of_step]}")
    out.write_text(json.dumps(report, indent=2) + "\n")
    print(f"\nwritten to {out}")


if __name__ == "__main__":
    main()
