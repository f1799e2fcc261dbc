"""Files that are damaged on purpose: one line that says what is wrong, or the same model.

Every case ends in a ValueError of one line, with the file and what is wrong in it, or in a model
with the logits of the undamaged one. A number that is legal where it stands is another model.
"""

import json
import math
import random
import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import tiny_gpt2, tiny_qwen2, token_ids

from lm_from_scratch.checkpoint.configs import GPT2_NAMES
from lm_from_scratch.checkpoint.dialects import DECODER_NAMES
from lm_from_scratch.checkpoint.weights import (
    classifier_from_pretrained,
    from_pretrained,
    save_pretrained,
)
from lm_from_scratch.layers.rope_scaling import YaRNScaling
from lm_from_scratch.models.heads import TokenClassifier
from lm_from_scratch.text.tokenizer import Tokenizer
from lm_from_scratch.weights.quantize import quantize_

IDX = token_ids(2, 9)
OUR_NAMES = {theirs: our for names in (GPT2_NAMES, DECODER_NAMES) for our, theirs in names.items()}


def nested(depth: int, innermost: Any = 1) -> Any:
    for level in range(depth):
        innermost = [innermost] if level % 2 else {"a": innermost}
    return innermost


ODD = [
    None, True, False, -1, 0, 1, 1.5, math.nan, math.inf, -math.inf, 10**9, 10**30, 10**400, 1e300,
    "", "x", "3", "a\nb", "\ud800", [], [1], [None, "x"], [[]], {}, {"0": "a"}, {"a": {"b": []}},
    nested(20), "long " * 5000, list(range(1000)),
]  # fmt: skip

LEFT_OUT = Path()  # stands for no value at all

#: Keys whose legal values make another model of the same shapes. (None stands for a default.)
FREE = {
    "n_head", "layer_norm_epsilon", "rms_norm_eps", "rope_theta", "factor", "truncate",
    "original_max_position_embeddings", "sliding_window",
}  # fmt: skip

#: Where the fault of one key is found by another.
RELATED = {
    "beta_slow": "beta_fast", "rope_scaling": "rope_parameters", "format": "quantised",
    "max_position_embeddings": "original_length", "tie_word_embeddings": "lm_head",
}  # fmt: skip
OF_WEIGHTS = ("has shape", "weights have", "missing", "unexpected", "no tensor is", "group_size")


def made(family: str) -> Any:
    if family == "gpt2":
        return tiny_gpt2(n_layer=1)
    scaling = YaRNScaling(factor=2.0, original_length=4)
    window = dict(sliding_window=4, layer_types=("full_attention", "sliding_attention"))
    if family == "qwen2":
        return tiny_qwen2(n_layer=2, rope_scaling=scaling, **window)
    if family == "labels":
        return TokenClassifier(tiny_gpt2(n_layer=2).backbone, 2).eval()
    model = tiny_gpt2(n_layer=2)
    quantize_(model, 8, 14)
    return model


FAMILIES = ["gpt2", "qwen2", "labels", "quantised"]
each_family = pytest.mark.parametrize(
    "family", ["gpt2", *(pytest.param(name, marks=pytest.mark.slow) for name in FAMILIES[1:])]
)


def read(folder: Path) -> Any:
    labels = "Classification" in (folder / "config.json").read_text()
    return (classifier_from_pretrained if labels else from_pretrained)(folder)


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, torch.Tensor]]:
    """The folder of each family, and its logits; one has shards."""
    torch.manual_seed(0)
    root = tmp_path_factory.mktemp("sound")
    logits = {}
    for family in FAMILIES:
        save_pretrained(made(family), root / family, None, 40_000 if family == "qwen2" else 10**9)
        with torch.no_grad():
            logits[family] = read(root / family)(IDX)
    return lambda family: (root / family, logits[family])


@pytest.fixture
def copied(
    sound: Callable[[str], tuple[Path, torch.Tensor]], tmp_path: Path
) -> Callable[[str], tuple[Path, torch.Tensor]]:
    """A copy of the folder, to be damaged, and the logits."""

    def copy(family: str) -> tuple[Path, torch.Tensor]:
        folder, logits = sound(family)
        return shutil.copytree(folder, tmp_path / "m"), logits

    return copy


def refused(folder: Path, want: torch.Tensor, *names: str, may_differ: bool = False) -> str:
    """ "refused" by a ValueError of one line that has the folder and one of the ``names`` in it,
    "same" for the same logits. Anything else is a failure, unless the logits ``may_differ``."""
    try:
        with torch.no_grad():
            got = read(folder)(IDX)
    except ValueError as error:
        message = str(error)
        assert "\n" not in message and len(message) < 1500, message
        assert folder.name in message, message
        assert not names or any(name in message for name in names), (names, message)
        return "refused"
    assert torch.equal(got, want) or may_differ, f"another model, without a word: {names}"
    return "same"


def damaged(contents: dict[str, Any]) -> Iterator[tuple[str, Any, dict[str, Any]]]:
    """Each key with each odd value, also inside objects, and each key left out."""
    for key, value in contents.items():
        for odd in ODD:
            yield key, odd, {**contents, key: odd}
        yield key, LEFT_OUT, {k: v for k, v in contents.items() if k != key}
        if isinstance(value, dict):
            for inner, odd, changed in damaged(value):
                yield inner, odd, {**contents, key: changed}


#: Keys that are read where they are, and that no folder here has.
MORE = {
    "id2label": None, "label2id": None, "num_labels": None, "classifier_dropout": None,
    "hidden_dropout": None, "torch_dtype": "float32", "quantization_config": None,
    "scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False, "problem_type": None,
    "pad_token_id": None, "add_cross_attention": False, "unknown": 1, "is_causal": True,
    "num_nextn_predict_layers": 0, "n_routed_experts": None, "auto_map": {"AutoModel": "a.B"},
}  # fmt: skip


@pytest.mark.slow
@each_family
def test_no_odd_value_of_a_config_is_a_traceback(
    family: str, copied: Callable[[str], tuple[Path, torch.Tensor]]
) -> None:
    folder, want = copied(family)
    contents = json.loads((folder / "config.json").read_text())
    outcomes = set()
    for key, odd, changed in damaged({**MORE, **contents}):
        (folder / "config.json").write_text(json.dumps(changed))
        may_differ = key in FREE and (odd is None or isinstance(odd, bool | int | float | Path))
        names = {key, OUR_NAMES.get(key, key), RELATED.get(key, key), *OF_WEIGHTS}
        outcomes.add(refused(folder, want, *names, may_differ=may_differ))
    assert {"refused", "same"} <= outcomes


@each_family
def test_no_flipped_bit_of_a_header_is_a_traceback(
    family: str, copied: Callable[[str], tuple[Path, torch.Tensor]]
) -> None:
    """Names, shapes, dtypes, places: the numbers after the header have no digest."""
    folder, want = copied(family)
    file = min(folder.glob("*.safetensors"))
    whole = file.read_bytes()
    header = 8 + int.from_bytes(whole[:8], "little")
    for bit in random.Random(0).sample(range(8 * header), 250) + list(range(64)):
        flipped = bytearray(whole)
        flipped[bit // 8] ^= 1 << bit % 8
        file.write_bytes(flipped)
        refused(folder, want)


@each_family
def test_no_length_of_a_file_is_a_traceback(
    family: str, copied: Callable[[str], tuple[Path, torch.Tensor]]
) -> None:
    folder, want = copied(family)
    draw = random.Random(1)
    for file in sorted(folder.iterdir()):
        whole = file.read_bytes()
        for length in [0, 1, 7, 8, 9, *draw.sample(range(len(whole) - 1), 20)]:
            file.write_bytes(whole[:length])
            outcome = refused(folder, want)
            assert outcome == "refused" or file.name == "config.json" or length > 0
        file.write_bytes(whole + b"x")
        refused(folder, want)
        file.write_bytes(whole)


def test_no_fault_of_an_index_is_a_traceback(
    copied: Callable[[str], tuple[Path, torch.Tensor]], tmp_path: Path
) -> None:
    folder, want = copied("qwen2")
    index = folder / "model.safetensors.index.json"
    contents = json.loads(index.read_text())
    places: dict[str, Any] = contents["weight_map"]
    first, last = sorted(set(places.values()))[0], sorted(set(places.values()))[-1]
    name = next(name for name, file in places.items() if file == first)
    shutil.copy(folder / first, tmp_path / first)  # one folder up
    elsewhere = [last, "../" + first, str(tmp_path / first), "nowhere.safetensors", "..", ".", "/"]
    elsewhere += ["config.json", "\0", "a" * 5000, "model.safetensors.index.json"]
    for odd in [*ODD, *elsewhere]:
        faults = [
            {"weight_map": {**places, name: odd}},
            {"weight_map": {**places, "more": odd}},
            {"weight_map": odd},
        ]
        for fault in faults:
            index.write_text(json.dumps(fault))
            assert refused(folder, want) == "refused"
    for odd in ODD:  # what nobody reads
        index.write_text(json.dumps({**contents, "metadata": odd, "more": odd}))
        assert refused(folder, want) == "same"
    for text in ["", "[", "[" * 100_000, '{"a":' * 100_000, "\xff", "1" * 5000]:
        index.write_text(text, encoding="latin-1")
        assert refused(folder, want) == "refused"


@each_family
def test_no_odd_tensor_is_a_traceback(
    family: str, copied: Callable[[str], tuple[Path, torch.Tensor]]
) -> None:
    """Each tensor renamed, left out, of another shape, of another dtype, or twice."""
    folder, want = copied(family)
    file = min(folder.glob("*.safetensors"))
    tensors = load_file(file)
    edits: list[Callable[[str, torch.Tensor], dict[str, torch.Tensor]]] = [
        lambda name, t: {},
        lambda name, t: {name + "x": t},
        lambda name, t: {name.replace(".", "", 1): t},
        lambda name, t: {name: t, "transformer." + name: t.clone()},
        lambda name, t: {name: t[None].contiguous()},
        lambda name, t: {name: t.flatten()[0].clone()},
        lambda name, t: {name: t.flatten()[:-1].clone()},
        lambda name, t: {name: t.new_zeros(0)},
        lambda name, t: {name: t.to(torch.int32)},
        lambda name, t: {name: t.to(torch.bool)},
        lambda name, t: {name: t.to(torch.complex64)},
        lambda name, t: {name: t.to(torch.float8_e4m3fn)},
    ]
    for name in sorted(tensors):
        rest = {other: t for other, t in tensors.items() if other != name}
        for edit in edits:
            save_file({**rest, **edit(name, tensors[name])}, file)
            assert refused(folder, want) == "refused"


@pytest.mark.slow
def test_no_damage_of_a_tokenizer_is_a_traceback(tmp_path: Path) -> None:
    whole = Tokenizer.train(["some text, and some more of it"], 280)
    whole.save(tmp_path)
    file = tmp_path / "tokenizer.json"
    contents, text = json.loads(file.read_text()), file.read_text()
    ids = whole.encode("some text")
    cases = [json.dumps(changed) for _, _, changed in damaged(contents)]
    cases += [text[:length] for length in random.Random(2).sample(range(len(text)), 40)]
    for case in cases:
        file.write_text(case)
        with suppress(ValueError):
            Tokenizer.load(tmp_path).encode("some text")
    file.write_text(text)
    assert Tokenizer.load(tmp_path).encode("some text") == ids
