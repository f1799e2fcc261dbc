"""lora.py: adapters are peft's, learn alone, go on where a run was killed, and merge back."""

import copy
import json
import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from tiny_models import hf_twin, tiny_gpt2, tiny_qwen2, token_ids
from torch import Tensor, nn
from unchanged import assert_unchanged, snapshot

from lm_from_scratch.checkpoint.weights import from_pretrained, save_pretrained
from lm_from_scratch.instruments.onednn import use_onednn_
from lm_from_scratch.interop.peft import PREFIX, load_lora_, save_lora
from lm_from_scratch.models.heads import SequenceClassifier
from lm_from_scratch.models.interface import CausalLM
from lm_from_scratch.optim.choose import make_optimizer
from lm_from_scratch.runs.config import TrainConfig
from lm_from_scratch.runs.distributed import Processes
from lm_from_scratch.text.targets import next_token_targets
from lm_from_scratch.training.gradient_checkpointing import use_gradient_checkpointing_
from lm_from_scratch.training.loss import causal_lm_loss
from lm_from_scratch.training.objective import NextTokenLoss
from lm_from_scratch.weights.lora import LoRALinear, add_lora_, merge_lora_, nothing
from lm_from_scratch.weights.quantize import dequantize_, quantize_
from lm_from_scratch.weights.quantized_weight import QuantizedWeight

MODELS: dict[str, Callable[..., CausalLM]] = {"gpt2": tiny_gpt2, "qwen2": tiny_qwen2}
GROUP = {"gpt2": 28, "qwen2": 8}
SHORT_NAMES = {"gpt2": ["c_attn", "c_proj"], "qwen2": ["q_proj", "o_proj", "down_proj"]}

ONE = Processes()

both = pytest.mark.parametrize("name", MODELS)
quietly = pytest.mark.filterwarnings("ignore")  # peft warns of what transformers deprecates


def is_norm(name: str) -> bool:
    return "ln_" in name or "norm" in name


def some(name: str) -> bool:
    return name.endswith(("c_attn", "c_proj", "q_proj", "o_proj", "down_proj"))


def built(
    name: str, bits: int = 0, dtype: torch.dtype = torch.float64, weight_only: bool = False
) -> CausalLM:
    model = MODELS[name]().to(dtype)
    if bits:
        group_size = GROUP[name] if bits == 4 else None
        quantize_(model, bits, group_size, weight_only=weight_only)
    return model


@torch.no_grad()
def shift_(model: nn.Module) -> None:
    """As if it had been trained: everything that has a gradient moves."""
    generator = torch.Generator().manual_seed(3)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter += torch.randn(parameter.shape, generator=generator).to(parameter) * 0.2


def adapted(
    name: str, bits: int = 0, also_train=nothing, weight_only: bool = False, **options
) -> CausalLM:
    model = built(name, bits, weight_only=weight_only)
    add_lora_(model, **{"rank": 3, "alpha": 7.0, "select": some, **options}, also_train=also_train)
    shift_(model)
    return model


def backward(model: nn.Module, idx: Tensor) -> Tensor:
    loss = causal_lm_loss(model(idx), next_token_targets(idx))
    loss.backward()
    return loss.detach()


# ------------------------------------------------------------------------------- one linear map


def test_the_formula_and_its_gradients() -> None:
    """y = W x + b + alpha / r B A x; dB = alpha / r g (A x)^T, dA = alpha / r B^T g x^T."""
    model = nn.Sequential(nn.Linear(5, 4)).double()
    add_lora_(model, rank=2, alpha=3.0)
    shift_(model)
    layer = model[0]
    assert isinstance(layer, LoRALinear) and layer.rank == 2 and layer.alpha == 3.0
    assert "rank=2, alpha=3.0" in repr(layer)
    x = torch.randn(7, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    g = torch.randn(7, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    y = model(x)
    w, bias, a, b = layer.weight, layer.bias, layer.lora_a, layer.lora_b
    assert a.shape == (2, 5) and b.shape == (4, 2)
    torch.testing.assert_close(y, x @ (w + 1.5 * b @ a).T + bias, rtol=1e-14, atol=1e-14)
    y.backward(g)
    torch.testing.assert_close(b.grad, 1.5 * g.T @ (x @ a.T), rtol=1e-14, atol=1e-14)
    torch.testing.assert_close(a.grad, 1.5 * b.T @ g.T @ x, rtol=1e-14, atol=1e-14)
    assert w.grad is None and bias.grad is None


@both
@pytest.mark.parametrize("bits", [0, 8, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nothing_changes_before_the_first_step(name, bits, dtype) -> None:
    model, idx = built(name, bits, dtype), token_ids(2, 11)
    expected = model(idx)
    add_lora_(model, rank=3, dropout=0.5)
    assert torch.equal(model(idx), expected)
    layers = [m for m in model.modules() if isinstance(m, LoRALinear)]
    assert len(layers) == {"gpt2": 4, "qwen2": 7}[name] * 3  # all but the head
    assert all(not layer.lora_b.any() and layer.lora_a.dtype == dtype for layer in layers)
    backward(model, idx)
    assert all(not layer.lora_a.grad.any() and layer.lora_b.grad.any() for layer in layers)


def test_a_is_drawn_like_peft_draws_it_and_by_its_seed_alone(seeded) -> None:
    import peft

    drawn = []
    state = torch.get_rng_state()
    for seed in (0, 0, 1):
        model = nn.Sequential(nn.Linear(400, 300), nn.Linear(300, 100))
        state = torch.get_rng_state()
        add_lora_(model, rank=64, seed=seed)
        assert torch.equal(torch.get_rng_state(), state)
        drawn.append([module.lora_a for module in model])
    assert torch.equal(drawn[0][0], drawn[1][0]) and torch.equal(drawn[0][1], drawn[1][1])
    assert not torch.equal(drawn[0][0], drawn[2][0])
    assert not torch.equal(drawn[0][0][:, :300], drawn[0][1])
    config = peft.LoraConfig(r=64, target_modules=["0"])
    theirs = peft.get_peft_model(nn.Sequential(nn.Linear(400, 300)), config)
    theirs = theirs.base_model.model[0].lora_A["default"].weight
    for a in (drawn[0][0].detach(), theirs.detach()):
        assert 0.99 / 20 < a.abs().max() < 1 / 20
        assert a.std() == pytest.approx(1 / 20 / math.sqrt(3), rel=0.02)
        assert abs(a.mean()) < 1e-3


def test_dropout_is_for_training_and_on_the_way_of_the_adapter_alone(seeded) -> None:
    layer = nn.Sequential(nn.Linear(5, 4))
    add_lora_(layer, rank=2, alpha=4.0, dropout=0.4)
    shift_(layer)
    w, bias, a, b = layer[0].weight, layer[0].bias, layer[0].lora_a, layer[0].lora_b
    x = torch.randn(50, 5)
    torch.testing.assert_close(layer.eval()(x), x @ (w + 2 * b @ a).T + bias)
    torch.manual_seed(5)
    y = layer.train()(x)
    torch.manual_seed(5)
    dropped = F.dropout(x, 0.4, True)
    assert 0.2 < (dropped == 0).float().mean() < 0.6
    torch.testing.assert_close(y, x @ w.T + bias + 2 * dropped @ a.T @ b.T)


# ----------------------------------------------------------------------------------------- peft


def peft_name(name: str) -> str:
    """What peft calls a parameter of ours while it trains."""
    stem, _, end = name.rpartition(".")
    end = {"lora_a": "lora_A.default.weight", "lora_b": "lora_B.default.weight"}.get(
        end, f"modules_to_save.default.{end}"
    )
    return f"base_model.model.{stem}.{end}"


@quietly
@both
@pytest.mark.parametrize("also_train", [nothing, is_norm])
def test_peft_reads_ours_and_computes_the_same(tmp_path, name, also_train) -> None:
    import peft

    twin = hf_twin(MODELS[name]()).double()
    model, idx = adapted(name, also_train=also_train), token_ids(2, 11)
    save_lora(model, tmp_path / "lora")
    theirs = peft.PeftModel.from_pretrained(
        twin, tmp_path / "lora", is_trainable=True, autocast_adapter_dtype=False
    )
    config = json.loads((tmp_path / "lora" / "adapter_config.json").read_text())
    assert config["fan_in_fan_out"] == (name == "gpt2")  # peft corrects it, with a warning
    near = dict(rtol=1e-4, atol=1e-5)  # their RMSNorm and their loss are float32
    torch.testing.assert_close(theirs(idx).logits, model(idx), **near)
    causal_lm_loss(theirs(idx).logits, next_token_targets(idx)).backward()
    backward(model, idx)
    ours = {n: p for n, p in model.named_parameters() if p.requires_grad}
    parameters = dict(theirs.named_parameters())
    trained = {n for n, p in parameters.items() if p.requires_grad}
    assert {peft_name(n) for n in ours} == trained
    for n, p in ours.items():
        torch.testing.assert_close(parameters[peft_name(n)].grad, p.grad, **near)
        assert p.grad.abs().max() > 1e-6
    merged = theirs.merge_and_unload().state_dict()
    merge_lora_(model)
    for n, p in model.named_parameters():
        w = (
            merged[n].T
            if n.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight"))
            else merged[n]
        )
        torch.testing.assert_close(p.detach(), w, rtol=1e-13, atol=1e-13)


@quietly
@both
@pytest.mark.parametrize("norms", [False, True])
def test_reads_what_peft_wrote(tmp_path, seeded, name, norms) -> None:
    import peft

    also = {"gpt2": ["ln_1", "ln_f"], "qwen2": ["input_layernorm", "lm_head"]}[name]
    config = peft.LoraConfig(
        r=3, lora_alpha=5, lora_dropout=0.1, target_modules=SHORT_NAMES[name],
        modules_to_save=also if norms else None, fan_in_fan_out=name == "gpt2",
        init_lora_weights="gaussian",
    )  # fmt: skip
    theirs = peft.get_peft_model(hf_twin(MODELS[name]()).double(), config)
    shift_(theirs)
    theirs.eval().save_pretrained(tmp_path)
    model, idx = built(name), token_ids(2, 11)
    load_lora_(model, tmp_path)
    torch.testing.assert_close(model(idx), theirs(idx).logits, rtol=1e-4, atol=1e-4)
    trained = {n for n, p in theirs.named_parameters() if p.requires_grad}
    assert {peft_name(n) for n, p in model.named_parameters() if p.requires_grad} == trained
    layers = [m for m in model.modules() if isinstance(m, LoRALinear)]
    assert all((m.rank, m.alpha, m.dropout) == (3, 5, 0.1) for m in layers)


@quietly
@both
def test_a_classifier_trains_its_score_too_and_peft_reads_it(tmp_path, name) -> None:
    import peft
    from transformers import AutoModelForSequenceClassification as HFModel

    model = SequenceClassifier(built(name).backbone, 3)
    save_pretrained(model, tmp_path / "model")
    add_lora_(model, rank=2, also_train=lambda n: n == "score.weight")
    shift_(model)
    save_lora(model, tmp_path / "lora")
    twin = HFModel.from_pretrained(tmp_path / "model", num_labels=3)
    theirs = peft.PeftModel.from_pretrained(
        twin, tmp_path / "lora", autocast_adapter_dtype=False
    ).eval()
    idx = token_ids(1, 11)
    torch.testing.assert_close(theirs(idx).logits, model(idx), rtol=1e-4, atol=1e-5)
    again = SequenceClassifier(built(name).backbone, 3)
    load_lora_(again, tmp_path / "lora")
    assert torch.equal(again(idx), model(idx))


@quietly
def test_a_module_that_is_trained_in_part_is_written_whole(tmp_path) -> None:
    import peft

    twin, idx = hf_twin(tiny_gpt2()).double(), token_ids(2, 11)
    model = adapted("gpt2", also_train=lambda n: is_norm(n) and n.endswith("weight"))
    save_lora(model, tmp_path / "lora")
    theirs = peft.PeftModel.from_pretrained(twin, tmp_path / "lora", autocast_adapter_dtype=False)
    torch.testing.assert_close(theirs(idx).logits, model(idx))


@both
@pytest.mark.parametrize("bits", [0, 8, 4])
def test_written_and_read_again(tmp_path, name, bits) -> None:
    model, idx = adapted(name, bits, is_norm, dropout=0.25), token_ids(2, 11)
    save_lora(model, tmp_path / "lora")
    again = built(name, bits)
    load_lora_(again, tmp_path / "lora")
    assert torch.equal(again(idx), model(idx))
    assert next(m for m in again.modules() if isinstance(m, LoRALinear)).dropout == 0.25
    ours = {n for n, p in model.named_parameters() if p.requires_grad}
    assert ours == {n for n, p in again.named_parameters() if p.requires_grad}


def test_save_lora_replaces_adapters_and_nothing_else(tmp_path) -> None:
    model = adapted("gpt2", also_train=is_norm)
    save_lora(model, tmp_path / "lora")
    save_lora(torch.compile(adapted("gpt2", rank=2)), tmp_path / "lora")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["lora"]
    tensors = load_file(tmp_path / "lora" / "adapter_model.safetensors")
    assert not any("ln_" in n or "_orig_mod" in n for n in tensors)
    load_lora_(built("gpt2"), tmp_path / "lora")
    (tmp_path / "lora" / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match=r"other files.*notes.txt"):
        save_lora(model, tmp_path / "lora")
    assert (tmp_path / "lora" / "notes.txt").read_text() == "mine"
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ValueError, match="is a file, not a folder"):
        save_lora(model, tmp_path / "file")
    with pytest.raises(ValueError, match="has no adapters"):
        save_lora(built("gpt2"), tmp_path / "none")
    with pytest.raises(ValueError, match="has adapters: save_lora"):
        save_pretrained(model, tmp_path / "model")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "lora"]


A = "base_model.model.transformer.h.0.attn.c_attn.lora_A.weight"
B = A.replace("lora_A", "lora_B")
LN_F = "base_model.model.transformer.ln_f.weight"
#: What can be wrong with a folder: a change of its config, or of its tensors, and the message.
DAMAGES: list[tuple[str, dict, Callable[[dict], object], str]] = [
    ("r", {"r": 4}, len, r"c_attn.lora_a has shape \(3, 28\), not \(4, 28\)"),
    ("r text", {"r": "3"}, len, "r='3' and lora_alpha=7.0 must be numbers"),
    ("r true", {"r": True}, len, "r=True"),
    ("no alpha", {"lora_alpha": None}, len, "lora_alpha=None"),
    ("alpha", {"lora_alpha": -1}, len, "alpha=-1 must be a positive number"),
    ("alpha NaN", {"lora_alpha": math.nan}, len, "alpha=nan must be"),
    ("dropout", {"lora_dropout": "0.1"}, len, r"dropout='0.1' must be in \[0, 1\)"),
    ("dora", {"use_dora": True}, len, "use_dora=True is not supported"),
    ("rslora", {"use_rslora": "yes"}, len, "use_rslora='yes' is not a bool"),
    ("ranks", {"rank_pattern": {"c_attn": 2}}, len, r"lora_a has shape \(3, 28\), not \(2, 28\)"),
    ("no rank", {"rank_pattern": {"c_attn": 0}}, len, "rank_pattern of c_attn=0 must be an int"),
    ("words", {"alpha_pattern": {"c_(attn)+": 2}}, len, "is not supported, only names of maps"),
    ("no alphas", {"alpha_pattern": [2]}, len, r"alpha_pattern=\[2\] is not supported"),
    ("tokens", {"trainable_token_indices": [2]}, len, r"trainable_token_indices=\[2\] is not"),
    ("new", {"use_what_is_new": True}, len, "use_what_is_new=True is not known here"),
    ("bias", {"bias": "lora_only"}, len, "bias='lora_only' is not supported, only 'none'"),
    ("alora", {"alora_invocation_tokens": [5]}, len, "alora_invocation_tokens"),
    ("layers", {"layer_replication": [[0, 2]]}, len, "layer_replication"),
    ("init", {"init_lora_weights": "pissa"}, len, "init_lora_weights='pissa'"),
    ("kind", {"peft_type": "IA3"}, len, "peft_type='IA3' is not supported, only 'LORA'"),
    ("missing", {}, lambda t: t.pop(B), "missing transformer.h.0.attn.c_attn.lora_b"),
    ("no A", {}, lambda t: t.pop(A), "unexpected 'transformer.h.0.attn.c_attn.lora_b'"),
    ("empty", {}, lambda t: t.clear(), "no linear map was selected"),
    ("name", {}, lambda t: t.update(other=t[A].clone()), "unexpected 'other'"),
    ("head", {}, lambda t: t.update({"lm_head.lora_A.weight": t[A].clone()}), "lm_head"),
    ("B bias", {}, lambda t: t.update({B.replace("weight", "bias"): t[A].clone()}), "lora_B.bias"),
    ("shape", {}, lambda t: t.update({B: t[B].T.contiguous()}), r"lora_b has shape \(3, 84\)"),
    ("norm", {}, lambda t: t.update({LN_F: torch.ones(1)}), r"ln_f.weight has shape \(1,\)"),
    ("integers", {}, lambda t: t.update({A: t[A].long()}), "lora_a .torch.int64. holds other"),
    ("alpha true", {"lora_alpha": True}, len, "lora_alpha=True must be numbers"),
    ("bias of B", {"lora_bias": True}, len, "lora_bias=True is not supported"),
    ("others", {"target_parameters": ["wte"]}, len, "target_parameters"),
    ("twice", {}, lambda t: t.update({A.removeprefix(PREFIX): t[A].clone()}), "a name twice"),
    ("NaN", {}, lambda t: t[A].fill_(math.nan), "lora_a .torch.float64. holds other"),
    (
        "tied head",
        {},
        lambda t: t.update({"base_model.model.transformer.wte.weight": torch.ones(97, 28)}),
        "wte.weight is the head as well",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("config", "change", "message"), [d[1:] for d in DAMAGES],
                         ids=[d[0] for d in DAMAGES])  # fmt: skip
def test_a_folder_that_does_not_fit_is_refused_and_nothing_changes(
    tmp_path, config, change, message
) -> None:
    save_lora(adapted("gpt2", also_train=is_norm, select=lambda name: True), tmp_path)
    contents = json.loads((tmp_path / "adapter_config.json").read_text())
    (tmp_path / "adapter_config.json").write_text(json.dumps({**contents, **config}))
    tensors = load_file(tmp_path / "adapter_model.safetensors")
    change(tensors)
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    model = built("gpt2")
    before = snapshot(model)
    with pytest.raises(ValueError, match=message):
        load_lora_(model, tmp_path)
    assert_unchanged(model, before)


def test_damaged_files_are_refused(tmp_path) -> None:
    save_lora(adapted("gpt2"), tmp_path / "lora")
    file, config = (
        tmp_path / "lora" / f"adapter_{x}" for x in ("model.safetensors", "config.json")
    )
    file.write_bytes(file.read_bytes()[:-8])
    model = built("gpt2")
    before = snapshot(model)
    with pytest.raises(ValueError, match="damaged or incomplete"):
        load_lora_(model, tmp_path / "lora")
    file.unlink()
    with pytest.raises(ValueError, match=r"has no adapter_model\.safetensors"):
        load_lora_(model, tmp_path / "lora")
    config.write_text("{")
    with pytest.raises(ValueError, match="not valid JSON"):
        load_lora_(model, tmp_path / "lora")
    with pytest.raises(ValueError, match=r"no adapter_config.json"):
        load_lora_(model, tmp_path)
    assert_unchanged(model, before)


# ---------------------------------------------------------------------------------------- merging


@both
def test_merged_is_unmerged(tmp_path, name) -> None:
    model, idx = adapted(name, also_train=is_norm), token_ids(2, 11)
    plain_names = built(name).state_dict().keys()
    expected = model(idx).detach()
    assert (expected - built(name)(idx)).abs().max() > 0.1
    norms = [p for n, p in model.named_parameters() if is_norm(n)]
    merge_lora_(model)
    torch.testing.assert_close(model(idx), expected, rtol=1e-12, atol=1e-12)
    assert model.state_dict().keys() == plain_names
    assert not any(isinstance(m, LoRALinear) for m in model.modules())
    assert [p for p in model.parameters() if p.requires_grad] == norms
    with pytest.raises(ValueError, match="the model has no adapters"):
        merge_lora_(model)
    save_pretrained(model, tmp_path / "model")
    torch.testing.assert_close(from_pretrained(tmp_path / "model")(idx), model(idx))
    expected = model(idx).detach()
    add_lora_(model, rank=2)  # and a second time
    assert torch.equal(model(idx).detach(), expected)


@both
@pytest.mark.parametrize("bits", [8, 4])
def test_merging_into_quantised_weights(name, bits) -> None:
    """Plain weights, for everyone who holds them; what had no adapter stays quantised."""
    model, idx = adapted(name, bits), token_ids(2, 11)
    parameters, layers = dict(model.named_parameters()), dict(model.named_modules())
    expected, logits = {}, model(idx).detach()
    for n, p in parameters.items():
        layer = layers[n.rpartition(".")[0]]
        if isinstance(p, QuantizedWeight) and isinstance(layer, LoRALinear):
            change = layer.lora_b @ layer.lora_a * (7.0 / 3)
            expected[n] = (p.dequantize() + change).detach()
    head, optimizer = model.head.weight, torch.optim.SGD(parameters.values())
    merge_lora_(model)
    assert len(expected) == 3 * len(SHORT_NAMES[name]) + 3 * (name == "gpt2")  # two c_proj
    assert any(isinstance(p, QuantizedWeight) for n, p in parameters.items() if "mlp" in n)
    for n, w in expected.items():
        weight = parameters[n]  # the object from before
        assert type(weight) is nn.Parameter and weight.dtype == torch.float64
        assert dict(model.named_parameters())[n] is weight
        assert any(weight is p for p in optimizer.param_groups[0]["params"])
        torch.testing.assert_close(weight.detach(), w, rtol=1e-13, atol=1e-13)
        assert not weight.requires_grad
    assert model.head.weight is head and isinstance(head, QuantizedWeight)
    torch.testing.assert_close(model(idx), logits, rtol=1e-12, atol=1e-12)


def test_a_merge_rounds_once() -> None:
    model = tiny_gpt2().bfloat16()
    add_lora_(model, rank=3)
    shift_(model)
    layer = model.transformer.h[1].mlp.c_fc
    exact = layer.weight.double() + layer.lora_b.double() @ layer.lora_a.double() * (16.0 / 3)
    merge_lora_(model)
    assert layer.weight.dtype == torch.bfloat16 and torch.equal(layer.weight, exact.bfloat16())


def test_a_merge_that_cannot_be_changes_nothing() -> None:
    model = adapted("gpt2")
    before = snapshot(model)
    view = model.transformer.h[2].mlp.c_proj.weight.view(-1)  # the last one
    with pytest.raises(ValueError, match=r"h.2.mlp.c_proj.weight cannot be swapped"):
        merge_lora_(model)
    del view
    assert_unchanged(model, before)
    merge_lora_(model)


# --------------------------------------------------------------------------- what has a gradient


def formula(model: nn.Module, rank: int) -> int:
    """Numbers in the adapters of all linear maps of the blocks."""
    linears = [m for m in model.backbone.modules() if isinstance(m, nn.Linear)]
    return sum(rank * (m.in_features + m.out_features) for m in linears)


@both
@pytest.mark.parametrize("bits", [0, 8, 4])
@pytest.mark.parametrize("also_train", [nothing, is_norm])
def test_only_what_is_trained_has_gradients_and_state(name, bits, also_train) -> None:
    model = built(name, bits, torch.float32)
    of_norms = sum(p.numel() for n, p in model.named_parameters() if also_train(n))
    add_lora_(model, rank=3, also_train=also_train)
    trainable = [p for p in model.parameters() if p.requires_grad]
    numbers = sum(p.numel() for p in trainable)
    assert numbers == formula(model, 3) + of_norms
    optimizer = make_optimizer(model, TrainConfig(steps=1, weight_decay=0.0))
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    backward(model, token_ids(2, 11))
    assert [p for p in model.parameters() if p.grad is not None] == trainable
    optimizer.step()
    state = [t for values in optimizer.state.values() for t in values.values()]
    assert sum(t.nbytes for t in state) == 8 * numbers + 4 * len(trainable)
    for n, p in model.named_parameters():
        if p.requires_grad:
            moved = not torch.equal(p, before[n])
            assert moved == (not n.endswith("lora_a")), n  # A waits until B is not zero
        elif isinstance(p, QuantizedWeight):
            assert torch.equal(p.codes, before[n].codes)
        else:
            assert torch.equal(p, before[n])


def test_gradients_from_before_do_not_stay() -> None:
    """Clipping by the norm of all gradients would count them."""
    model, idx = tiny_gpt2(), token_ids(2, 11)
    backward(model, idx)
    add_lora_(model, rank=2, also_train=is_norm)
    left = {n for n, p in model.named_parameters() if p.grad is not None}
    assert left == {n for n, _ in model.named_parameters() if is_norm(n)}


@both
@pytest.mark.parametrize("bits", [8, 4])
def test_gradients_are_those_of_the_decoded_model(name, bits) -> None:
    model, idx = adapted(name, bits, is_norm), token_ids(2, 11)
    plain = copy.deepcopy(model)
    dequantize_(plain)
    for changed in (model, plain):
        backward(changed, idx)
    for (n, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
        if p.requires_grad:
            torch.testing.assert_close(p.grad, q.grad, rtol=1e-10, atol=1e-12)
            assert p.grad.any(), n
        else:
            assert p.grad is None and q.grad is None


@both
@pytest.mark.parametrize("bits", [0, 4])
def test_gradient_checkpointing(name, bits) -> None:
    model, idx = adapted(name, bits), token_ids(2, 11)
    again = copy.deepcopy(model)
    use_gradient_checkpointing_(again)
    assert torch.equal(backward(model, idx), backward(again, idx))
    for p, q in zip(model.parameters(), again.parameters(), strict=True):
        assert p.grad is None if q.grad is None else torch.equal(p.grad, q.grad)


@both
@pytest.mark.parametrize("bits", [0, 8, 4])
def test_bfloat16_and_autocast(name, bits) -> None:
    """With activations as they are: rounded to 7 bits, as on a processor without AVX-512, they
    alone turn a gradient further than this allows."""
    idx = token_ids(2, 11)
    exact = adapted(name, bits, weight_only=bits == 8).float()
    expected = backward(exact, idx)
    for dtype in (torch.bfloat16, torch.float32):
        model = adapted(name, bits, weight_only=bits == 8).to(dtype)
        loss = NextTokenLoss(model, "float32" if dtype == torch.bfloat16 else "bfloat16")
        value = loss(idx, next_token_targets(idx))
        value.backward()
        torch.testing.assert_close(value.detach().float(), expected.float(), rtol=0.05, atol=0.05)
        assert value != expected
        for p, q in zip(model.parameters(), exact.parameters(), strict=True):
            if p.requires_grad:
                assert p.grad.dtype == p.dtype == dtype
                cosine = F.cosine_similarity(p.grad.float().flatten(), q.grad.flatten(), dim=0)
                assert cosine > 0.9


@pytest.mark.parametrize("bits", [0, pytest.param(8, marks=pytest.mark.slow), 4])
def test_torch_compile_of_one_map(bits) -> None:
    layer = adapted("gpt2", bits).transformer.h[0].attn.c_attn
    x = torch.randn(2, 3, 28, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    expected = layer(x)
    got = torch.compile(layer, fullgraph=True, backend="aot_eager")(x)
    torch.testing.assert_close(got, expected)
    (want,) = torch.autograd.grad(expected.sum(), layer.lora_a)
    (grad,) = torch.autograd.grad(got.sum(), layer.lora_a)
    torch.testing.assert_close(grad, want)


@both
@pytest.mark.parametrize("bits", [0, 8, 4])
def test_a_copy_and_a_state_dict(name, bits) -> None:
    model, idx = adapted(name, bits, is_norm), token_ids(2, 11)
    expected = model(idx)
    other = copy.deepcopy(model)
    fresh = built(name, bits)
    add_lora_(fresh, rank=3, alpha=7.0, select=some, also_train=is_norm, seed=9)
    fresh.load_state_dict(model.state_dict())
    for again in (other, fresh):
        assert torch.equal(again(idx), expected)
        shift_(again)
        assert not torch.equal(again(idx), expected)
    assert torch.equal(model(idx), expected)


# --------------------------------------------------------------------------------------- refusals

WTE = "transformer.wte.weight"
REFUSED: list[tuple[str, dict, str]] = [
    ("rank 0", dict(rank=0), "rank=0 must be an integer, at least 1"),
    ("rank", dict(rank=2.0), "rank=2.0 must be an integer"),
    ("large rank", dict(rank=29), "rank=29 exceeds what transformer.h.0.attn.c_attn can have, 28"),
    ("alpha 0", dict(alpha=0.0), "alpha=0.0 must be a positive number"),
    ("alpha", dict(alpha=math.inf), "alpha=inf must be a positive number"),
    ("alpha text", dict(alpha="16"), "alpha='16' must be a positive number"),
    ("dropout 1", dict(dropout=1.0), r"dropout=1.0 must be in \[0, 1\)"),
    ("dropout", dict(dropout=-0.1), "dropout=-0.1 must be"),
    ("dropout NaN", dict(dropout=math.nan), "dropout=nan must be"),
    ("seed", dict(seed=None), "seed=None must be an integer"),
    ("none", dict(select=lambda n: n == "lm_head"), "no linear map was selected"),
    ("weight", dict(also_train=lambda n: n.endswith("c_fc.weight")), "part of a linear map"),
    ("bias", dict(also_train=lambda n: n.endswith("c_attn.bias")), "part of a linear map"),
    ("tied head", dict(also_train=lambda n: n == WTE), "wte.weight is the head as well"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("options", "message"), [r[1:] for r in REFUSED], ids=[r[0] for r in REFUSED]
)
def test_refused_and_nothing_changes(options, message) -> None:
    model = built("gpt2")
    before = snapshot(model)
    with pytest.raises(ValueError, match=message):
        add_lora_(model, **options)
    assert_unchanged(model, before)
    add_lora_(model, rank=28)  # the most


def test_refused_models_and_nothing_changes() -> None:
    model = adapted("gpt2")
    quantised = built("qwen2", 8)
    onednn = built("gpt2", dtype=torch.float32)
    use_onednn_(onednn)
    for refused, also_train, message in (
        (model, nothing, "has adapters already"),
        (quantised, lambda n: n == "lm_head.weight", "lm_head.weight is quantised"),
        (onednn, nothing, "c_attn is a OneDNNLinear, not a plain nn.Linear"),
        (nn.Sequential(nn.Tanh()), nothing, "no linear map was selected"),
    ):
        before = snapshot(refused)
        with pytest.raises(ValueError, match=message):
            add_lora_(refused, also_train=also_train)
        assert_unchanged(refused, before)
    before = snapshot(model)
    with pytest.raises(ValueError, match="c_attn is a LoRALinear: what else reads its weight"):
        quantize_(model)
    assert_unchanged(model, before)


def test_numbers_that_overflow_the_model_are_refused(tmp_path) -> None:
    model = adapted("gpt2")
    with torch.no_grad():
        model.transformer.h[0].attn.c_attn.lora_b[0, 0] = 1e30
    save_lora(model, tmp_path)
    half = built("gpt2", dtype=torch.float16)
    before = snapshot(half)
    with pytest.raises(ValueError, match=r"lora_b .*holds other things than finite"):
        load_lora_(half, tmp_path)
    assert_unchanged(half, before)


def test_the_device_of_the_block_does_not_matter() -> None:
    one, other = built("gpt2"), built("gpt2")
    add_lora_(one)
    with torch.device("meta"):
        add_lora_(other)
    for p, q in zip(one.parameters(), other.parameters(), strict=True):
        assert torch.equal(p, q)


def test_shared_weights_are_refused() -> None:
    """Merging one of the two would change the other."""
    net = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    net[2].weight = net[0].weight
    before = snapshot(net)
    for select in (None, lambda name: name == "2"):
        with pytest.raises(ValueError, match="shares its weight"):
            add_lora_(net, rank=1, select=select)
        assert_unchanged(net, before)


def test_a_linear_map_alone() -> None:
    layer, x = nn.Linear(4, 3), torch.randn(2, 4)
    add_lora_(layer, rank=2)
    shift_(layer)
    y = layer(x)
    merge_lora_(layer)
    torch.testing.assert_close(layer(x), y)
    assert type(layer) is nn.Linear


def test_adapters_are_written_frozen_too_and_unequal_ones_not(tmp_path) -> None:
    model, again, idx = adapted("gpt2"), built("gpt2"), token_ids(2, 7)
    model.requires_grad_(False)
    save_lora(model, tmp_path / "frozen")
    load_lora_(again, tmp_path / "frozen")
    assert torch.equal(again(idx), model(idx))
    model.transformer.h[0].attn.c_attn.dropout = 0.5
    with pytest.raises(ValueError, match=r"differ in their dropout: \[0.0, 0.5\]"):
        save_lora(model, tmp_path / "unequal")
    assert not (tmp_path / "unequal").exists()
