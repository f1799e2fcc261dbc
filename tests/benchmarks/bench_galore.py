"""GaLore beside galore-torch and pytorch_optimizer.

What is compared: which types, shapes, ranks and dtypes an implementation can update at all, with
the closed form as result; a step between two bases; new bases, and how much of a real gradient's
energy the cheaper ones keep; bytes of state; and the most memory that training steps take. The
model is the 60M configuration of the paper (58 M parameters, 56 projected matrices, rank 128), with
gradients of real text.

The peers take part if they are installed. ``make bench`` puts them into a folder of its own,
without the libraries that galore-torch asks for and these rows do not need.
"""

import importlib.machinery
import importlib.util
import itertools
import statistics
import sys
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import measure
import torch
from measure import Row, Size
from torch import Tensor, nn
from tqdm import tqdm

from lm_from_scratch.instruments.onednn import onednn_matmul
from lm_from_scratch.models.qwen2 import Qwen2Config, Qwen2ForCausalLM
from lm_from_scratch.optim.adamw import AdamW
from lm_from_scratch.optim.galore import GaLore
from lm_from_scratch.optim.galore_basis import (
    captured_energy,
    project,
    project_back,
    sides,
    singular_basis,
)
from lm_from_scratch.optim.in_backward import update_in_backward
from lm_from_scratch.text.corpora import reference
from lm_from_scratch.text.tokenizer import Tokenizer
from lm_from_scratch.training.loss import causal_lm_loss

RANK, GAP, SCALE = 128, 200, 0.25
RENEWED = 14  # matrices of two layers: new bases for all take long
OURS = (
    "ours, svd", "ours, gram", "ours, gram, oneDNN", "ours, subspace", "ours, subspace, oneDNN"
)  # fmt: skip
SIXTY_M = dict(
    vocab_size=32000, block_size=256, n_layer=8, n_head=8, n_kv_head=8, n_embd=512,
    intermediate_size=1376, tie_word_embeddings=False, eos_token_id=None,
)  # fmt: skip
TINY = SIXTY_M | dict(vocab_size=1024, n_embd=160, intermediate_size=192, n_layer=1)
THEIRS, OTHERS, PLAIN = "galore-torch 1.0", "pytorch_optimizer 4.1", "torch's fused AdamW"
EIGHT = "bitsandbytes 0.50, AdamW, 8 bits"


def rows(size: Size) -> Iterator[Row]:
    kinds = peers()
    yield from correct_cells(kinds, size)
    model, kept = real_gradients(2 if size.smoke else 6 if size.quick else 8, size)
    yield from step_times(kinds, model, kept, size)
    yield from eight_bits(model, kept[-1], size)
    if measure.has_peak():
        kinds_of_step = ("AdamW", "GaLore", "AdamW in backward", "GaLore in backward")
        held = {
            kind: [measure.in_a_process("bench_galore", "grown", kind, size.smoke)]
            for kind in kinds_of_step
        }
        for kind in kinds_of_step[1:]:
            yield measure.compare(
                "training steps of 64 tokens", kind, "AdamW", "MB", held[kind], held["AdamW"]
            )


def peers() -> dict[str, Any]:
    """The optimizer classes that are installed."""
    found: dict[str, Any] = {"ours": GaLore}
    stand_ins: dict[str, types.ModuleType] = {}
    if importlib.util.find_spec("bitsandbytes") is None:  # galore-torch imports it for its 8 bits
        for name in ("bitsandbytes", "bitsandbytes.optim", "bitsandbytes.optim.optimizer"):
            stand_ins[name] = types.ModuleType(name)
            stand_ins[name].__spec__ = importlib.machinery.ModuleSpec(name, None)
        stand_ins[name].Optimizer2State = object  # type: ignore[attr-defined]
    sys.modules.update(stand_ins)
    try:
        for name, module, attribute in (
            (THEIRS, "galore_torch", "GaLoreAdamW"),
            (OTHERS, "pytorch_optimizer", "GaLore"),
        ):
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    found[name] = getattr(importlib.import_module(module), attribute)
            except ImportError:
                tqdm.write(f"{name} is not installed, and takes no part")
    finally:
        for name in stand_ins:  # who asks for it later shall not find it
            del sys.modules[name]
    return found


def build(
    name: str, kind: Any, matrices: list[Tensor], others: list[Tensor], group: dict[str, Any],
    **options: Any,
) -> Any:  # fmt: skip
    """An optimizer of one implementation; galore-torch has a name of its own for the type."""
    if name == THEIRS:
        group = {"proj_type" if k == "projection_type" else k: v for k, v in group.items()}
        options["no_deprecation_warning"] = True
    groups = [{"params": matrices, **group}] + ([{"params": others}] if others else [])
    return kind(groups, weight_decay=0.0, eps=1e-8, lr=1e-3, **options)


# ------------------------------------------------------------------ 1. what works, and is right


def correctness(kinds: dict[str, Any], size: Size) -> dict[str, dict[str, str]]:
    """Two steps on one basis against the closed form, for each shape, rank, type and dtype."""
    report: dict[str, dict[str, str]] = {}
    shapes = {"tall": (24, 10), "wide": (10, 24), "square": (16, 16)}
    types_ = ("std", "reverse_std", "left", "right", "full", "random")
    for name, kind in kinds.items():
        for type_, (shape_name, shape) in itertools.product(types_, shapes.items()):
            dtypes = (torch.float32, torch.float64, torch.bfloat16)[: 1 if size.smoke else None]
            for rank, dtype in itertools.product((1, 4, min(shape)), dtypes):
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


def correct_cells(kinds: dict[str, Any], size: Size) -> Iterator[Row]:
    """How many combinations each implementation gets right."""
    table = correctness(kinds, size)
    right = {name: sum(cells[name] == "ok" for cells in table.values()) for name in kinds}
    for peer in list(kinds)[1:]:
        failed = [key for key, cells in table.items() if cells[peer] != "ok"]
        types_ = sorted({key.partition(",")[0] for key in failed})
        yield Row(
            setting="types, shapes, ranks and dtypes that are right", kind="ours", peer=peer,
            unit=f"of {len(table)}", ours=right["ours"], theirs=right[peer], rounds=1,
            ratio=measure.spread([right["ours"] / right[peer]]), target=1.0,
            note=f"theirs fails for {', '.join(types_)}" if failed else "",
        )  # fmt: skip


# ------------------------------------------------------------------------------- 2. and 3. time


def real_gradients(steps: int, size: Size) -> tuple[Qwen2ForCausalLM, list[dict[str, Tensor]]]:
    """The 60M model, and its gradients at the middle and the last of ``steps`` training steps."""
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(Qwen2Config(**TINY if size.smoke else SIXTY_M))  # type: ignore
    texts = [document.text for document in reference()][: 2 if size.smoke else None]
    tokenizer = Tokenizer.train(texts, 1024 if size.smoke else 4096)
    ids = torch.tensor([token for text in texts for token in tokenizer.encode(text)])
    optimizer = AdamW(model.parameters(), lr=1e-3, fused=True)
    kept = []
    for step in range(steps):
        rows = ids[step * 1024 :][:1028].view(4, 257)
        optimizer.zero_grad()
        causal_lm_loss(model(rows[:, :-1]), rows[:, 1:]).backward()
        if step in (steps // 2, steps - 1):
            kept.append({n: p.grad.clone() for n, p in model.named_parameters()})  # type: ignore
        optimizer.step()
    return model, [kept[0], kept[-1]]


def matrices_of(model: Qwen2ForCausalLM) -> list[str]:
    """The names of the projected weights: attention and MLP."""
    return [n for n, p in model.named_parameters() if "layers" in n and p.dim() == 2]


def step_times(
    kinds: dict[str, Any], model: Qwen2ForCausalLM, kept: list[dict[str, Tensor]], size: Size
) -> Iterator[Row]:
    """A step of the whole model between two bases, and new bases for two of its layers."""
    names, (older, grads) = matrices_of(model), kept
    steps: dict[str, Callable[[], object]] = {}
    renewals: dict[str, Callable[[], object]] = {}
    group = dict(rank=RANK, update_proj_gap=GAP, scale=SCALE, projection_type="std")
    variants: dict[str, tuple[Any, dict[str, Any]]] = {
        name: (kind, {}) for name, kind in kinds.items() if name != "ours"
    }
    for label in OURS:
        variants[label] = (GaLore, {"basis": label.split(", ")[1], "fused": True})
    megabytes = {}
    for label, (kind, options) in variants.items():
        # a step is timed with one of our bases: between two bases, all cost the same
        timed = "ours" not in label or "gram" in label
        chosen = list(grads) if timed else names[:RENEWED]
        params = {n: nn.Parameter(grads[n].clone()) for n in chosen}
        for n, p in params.items():
            p.grad = older[n]
        matrices = [p for n, p in params.items() if n in names]
        others = [p for n, p in params.items() if n not in names]
        optimizer = build(label, kind, matrices, others, group, **options)
        if "oneDNN" in label:
            optimizer.matmul = onednn_matmul
        optimizer.step()
        for n, p in params.items():
            p.grad = grads[n]
        if timed:
            steps[label] = optimizer.step
            megabytes["ours" if "ours" in label else label] = [held(optimizer) / 1e6]
        renewals[label] = renewal("ours" if "ours" in label else label, optimizer)
    params = {n: nn.Parameter(grads[n].clone()) for n in grads}
    for n, p in params.items():
        p.grad = grads[n]
    plain = AdamW(params.values(), fused=True)
    plain.step()
    megabytes["AdamW"] = [held(plain) / 1e6]
    steps[PLAIN] = plain.step
    for peer in megabytes:
        if peer != "ours":
            ours, theirs = megabytes["ours"], megabytes[peer]
            yield measure.compare("bytes of state", "ours", peer, "MB", ours, theirs, target=1.0)
    times = measure.in_turns(steps, size.rounds, title="steps of GaLore")
    peers = [kind for kind in (THEIRS, OTHERS, PLAIN) if kind in steps]
    for peer in peers:
        for label in ("ours, gram", "ours, gram, oneDNN"):
            target = 2.4 if peer == THEIRS else None
            yield times.row("a step between two bases", label, peer, target=target)
    news = measure.in_turns(renewals, size.rows(2), title="new bases", warm_up=False)
    energy = energies(model, kept)
    for peer in (kind for kind in peers if kind in renewals):
        for label in [label for label in renewals if "ours" in label]:
            exact = "subspace" not in label
            target = (None if "svd" in label else 3.5) if exact else 12.0
            least, median = energy[label.split(", ")[1]]
            note = f"of the best energy, at least {least:.4f}, median {median:.4f}"
            aim = target if peer == THEIRS else None
            yield news.row("new bases of two layers", label, peer, target=aim, note=note)
    # the basis is made once in GAP steps; the two layers are a part of all matrices
    share = len(names) / min(RENEWED, len(names)) / GAP
    for label in ("ours, gram, oneDNN", "ours, subspace, oneDNN"):
        both = {
            kind: [a + share * statistics.median(news.seconds[kind]) for a in times.seconds[steady]]
            for kind, steady in ((label, OURS[2]), *((p, p) for p in peers if p != PLAIN))
        }
        for peer in list(both)[1:]:
            aim = 2.4 if peer == THEIRS else None
            ours, theirs = ([1e3 * s for s in both[kind]] for kind in (label, peer))
            title = f"a step with its part of the new bases, one in {GAP} steps"
            yield measure.compare(title, label, peer, "ms", ours, theirs, target=aim)


def eight_bits(model: Qwen2ForCausalLM, grads: dict[str, Tensor], size: Size) -> Iterator[Row]:
    """A step with moments of one byte a number beside the same in 32 bits, and the bytes."""
    names = matrices_of(model)
    made: dict[str, Any] = {}
    kinds = ["AdamW, 32 bits", "AdamW, 8 bits", "GaLore, 32 bits", "GaLore, 8 bits"]
    for kind in kinds + ([EIGHT] if importlib.util.find_spec("bitsandbytes") else []):
        params = {n: nn.Parameter(grads[n].clone()) for n in grads}
        for n, p in params.items():
            p.grad = grads[n]
        options = dict(fused=True, optim_bits=32 if "32" in kind else 8)
        if kind == EIGHT:
            made[kind] = importlib.import_module("bitsandbytes.optim").AdamW8bit(params.values())
        elif "AdamW" in kind:
            made[kind] = AdamW(params.values(), **options)
        else:
            matrices = [p for n, p in params.items() if n in names]
            others = [p for n, p in params.items() if n not in names]
            group = dict(rank=RANK, update_proj_gap=None)
            made[kind] = build("ours", GaLore, matrices, others, group, **options)
        made[kind].step()
    steps = {kind: optimizer.step for kind, optimizer in made.items()}
    times = measure.in_turns(steps, size.rounds, title="moments in 8 bits")
    pairs = [(kinds[1], EIGHT)] if EIGHT in made else []
    for ours, peer in [*pairs, (kinds[1], kinds[0]), (kinds[3], kinds[2])]:
        bytes_of = ([held(made[kind]) / 1e6] for kind in (ours, peer))
        yield times.row("a step with moments in 8 bits", ours, peer)
        yield measure.compare("bytes of state with moments in 8 bits", ours, peer, "MB", *bytes_of)


def renewal(name: str, optimizer: Any) -> Callable[[], None]:
    """Make all bases anew, as the optimizer does when they are due, and nothing else: in every
    round from those of an older gradient."""
    params = optimizer.param_groups[0]["params"][:RENEWED]
    older = {p: dict(optimizer.state[p]) for p in params}

    def renew() -> None:
        for p in params:
            state = optimizer.state[p]
            if name == "ours":
                state.update(older[p])
                optimizer.make_basis(p, p.grad, optimizer.param_groups[0])
            else:
                projector = state["projector"]
                side = "right" if p.shape[0] >= p.shape[1] else "left"
                arguments = (RANK, side) if name == THEIRS else (side,)
                made = projector.get_orthogonal_matrix(p.grad, *arguments)
                projector.ortho_matrix = made

    return renew


def energies(
    model: Qwen2ForCausalLM, kept: list[dict[str, Tensor]]
) -> dict[str, tuple[float, float]]:
    """The share of the last gradient's best energy that each basis keeps: least and median."""
    shares: dict[str, list[float]] = {}
    for n in matrices_of(model)[:RENEWED]:
        old, grad = kept[0][n], kept[-1][n]
        left, right = sides((grad.shape[0], grad.shape[1]), "std")
        exact = singular_basis(grad, RANK, left, right, "svd")
        stale = singular_basis(old, RANK, left, right, "svd")
        best = captured_energy(project(grad, *exact), grad)
        for name, basis in (
            ("svd", exact),
            ("gram", singular_basis(grad, RANK, left, right, "gram")),
            ("subspace", singular_basis(grad, RANK, left, right, "subspace", stale)),
        ):
            share = captured_energy(project(grad, *basis), grad) / best
            shares.setdefault(name, []).append(share.item())
    return {name: (min(values), statistics.median(values)) for name, values in shares.items()}


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


def grown(kind: str, tiny: bool) -> float:
    """MB that this process grows by in three training steps, weights not counted."""
    model = Qwen2ForCausalLM(Qwen2Config(**TINY if tiny else SIXTY_M))  # type: ignore[arg-type]
    names = matrices_of(model)
    idx = torch.randint(0, model.config.vocab_size, (1, 64))
    before = measure.peak_megabytes()
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
    return max(measure.peak_megabytes() - before, 0.1)
