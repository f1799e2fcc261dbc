"""The model that runs in a page, beside torch in the same test: in a real browser, from a server
and from a disk, with no network."""

# ruff: noqa: E501 - scripts of a page stand in strings

from __future__ import annotations

import base64
import math
import random
import shutil
from collections.abc import Callable, Iterator
from functools import cache, partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import Visit, new_context
from live import training, widgets
from playwright.sync_api import Browser, Page, Route

from lm_from_scratch.attention.kinds import attention_layers
from lm_from_scratch.checkpoint.weights import load_shipped
from lm_from_scratch.generation.sampling import Sampler, draw
from lm_from_scratch.inside.patching import put, run
from lm_from_scratch.inside.sites import Site, activations
from lm_from_scratch.instruments.plot import attention_maps
from lm_from_scratch.models.gpt2 import GPT2Config, GPT2LMHeadModel
from lm_from_scratch.weights.int8 import Int8Weight

MODELS = ("gpt2-docs", "qwen2-docs")
ENGINE = ("tensor", "kernel", "tokenizer", "attention", "gpt2", "qwen2", "sampling", "generate")
SCRIPTS = (
    *(*ENGINE, "widget", "widgets/move", "gradients", "training", "widgets/train"),
    *(f"models/{name}" for name in (*MODELS, "tasks", "worlds", "stories")),
)
LENGTHS = (1, 2, 17, pytest.param(100, marks=pytest.mark.slow), 256)

HELPERS = """
<script>
const floats = (text) => new Float32Array(Uint8Array.from(atob(text), (c) => c.charCodeAt(0)).buffer);
const doubles = (text) => new Float64Array(Uint8Array.from(atob(text), (c) => c.charCodeAt(0)).buffer);
const packed = (numbers) => {  // the bytes of float64, in base64
  let text = "";
  for (const byte of new Uint8Array(Float64Array.from(numbers).buffer)) text += String.fromCharCode(byte);
  return btoa(text);
};
const tensors = (packed) => Object.fromEntries(Object.entries(packed).map(([name, [shape, data]]) =>
  [name, { shape, data: doubles(data) }]));
const apart = (a, b) => {
  if (a.length !== b.length) return Infinity;
  let most = 0;
  for (let i = 0; i < a.length; i++) {
    const d = Math.abs(a[i] - b[i]);
    if (!(d <= most)) most = d;
  }
  return most;
};
</script>
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A page that loads the engine and its models, as a site has them."""
    made = tmp_path_factory.mktemp("live")
    shutil.copytree(widgets.LIVE, made, dirs_exist_ok=True)
    widgets.write_models(made / "models")
    scripts = "".join(f'<script src="{name}.js"></script>' for name in SCRIPTS)
    (made / "index.html").write_text(
        f'<!doctype html><link rel="icon" href="data:,">{scripts}{HELPERS}'
    )
    return made


@pytest.fixture(scope="module")
def address(folder: Path) -> Iterator[str]:
    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(folder))) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/index.html"
        server.shutdown()


def opened(browser: Browser, address: str) -> Iterator[Page]:
    visit = Visit(new_context(browser, "light", 1280).new_page())
    yield visit.open(address)
    assert not visit.problems


@pytest.fixture(scope="module")
def page(browser: Browser, folder: Path) -> Iterator[Page]:
    """Read from a disk."""
    yield from opened(browser, (folder / "index.html").as_uri())


@pytest.fixture(scope="module")
def served_page(browser: Browser, address: str) -> Iterator[Page]:
    yield from opened(browser, address)


#: How a page loses the kernel: it is asked to, or its browser has none, or a rule forbids it.
WITHOUT = ("asked", "missing", "forbidden")


@pytest.fixture(scope="module", params=WITHOUT)
def plain_page(browser: Browser, address: str, request: pytest.FixtureRequest) -> Iterator[Page]:
    page = new_context(browser, "light", 1280).new_page()
    if request.param == "missing":
        page.add_init_script("delete window.WebAssembly")
    if request.param == "forbidden":
        page.route("**/index.html", partial(serve_with_rule, address))
    page.goto(address + ("?kernel=plain" if request.param == "asked" else ""))
    yield page
    page.context.close()


def serve_with_rule(address: str, route: Route) -> None:
    answer = route.fetch()
    rule = {"content-security-policy": "script-src 'self' 'unsafe-inline'"}
    route.fulfill(response=answer, headers=answer.headers | rule)


def packed(x: torch.Tensor) -> str:
    return base64.b64encode(x.detach().to(torch.float32).numpy().tobytes()).decode()


def ids_of(length: int, seed: int = 0) -> list[int]:
    return torch.randint(0, 4096, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


@cache
def unchanged(name: str) -> Any:
    return load_shipped(name)[0].eval()


def wanted(name: str, ids: list[int]) -> torch.Tensor:
    with torch.no_grad():
        return unchanged(name)(torch.tensor([ids]))[0]  # (T, V)


ALL = """([name, ids, want]) => apart(lm.shipped(name).model.forward(ids, { all: true }), floats(want))"""
ONE_BY_ONE = """([name, ids, want]) => {
  const { model } = lm.shipped(name);
  const cache = model.cache();
  const V = model.config.vocab_size;
  want = floats(want);
  return Math.max(...ids.map((id, t) =>
    apart(model.forward([id], { cache }), want.subarray(t * V, (t + 1) * V))));
}"""
EDITED = """([name, texts, want]) => {
  const session = new lm.Session(lm.shipped(name).model);
  return Math.max(...texts.map((ids, i) => apart(session.logits(ids), floats(want[i]))));
}"""


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("length", LENGTHS)
def test_logits_in_one_pass_and_token_by_token(page: Page, name: str, length: int) -> None:
    ids = ids_of(length)
    given = [name, ids, packed(wanted(name, ids))]
    assert page.evaluate(ALL, given) < 5e-5
    assert page.evaluate(ONE_BY_ONE, given) < 5e-5


@pytest.mark.parametrize("name", MODELS)
def test_logits_from_a_server(served_page: Page, name: str) -> None:
    test_logits_in_one_pass_and_token_by_token(served_page, name, 17)


@pytest.mark.parametrize("name", [pytest.param(MODELS[0], marks=pytest.mark.slow), MODELS[1]])
def test_logits_without_the_kernel(plain_page: Page, name: str) -> None:
    assert plain_page.evaluate("() => lm.kernel === null")
    test_logits_in_one_pass_and_token_by_token(plain_page, name, 17)


def edits() -> list[list[int]]:
    """Texts after one another: longer, shorter, changed in the middle, the same, another."""
    a, b = ids_of(40), ids_of(30, seed=1)
    return [a[:10], a, a[:25], [*a[:12], 7, *a[13:]], a, a, b, [b[0]], [*b, *a]]


@pytest.mark.parametrize("name", MODELS)
def test_logits_after_an_edit_that_keeps_a_prefix(page: Page, name: str) -> None:
    want = [packed(wanted(name, ids)[-1]) for ids in edits()]
    assert page.evaluate(EDITED, [name, edits(), want]) < 5e-5


@pytest.mark.parametrize("name", MODELS)
def test_attention_weights(page: Page, name: str) -> None:
    ids = ids_of(50)
    maps = attention_maps(load_shipped(name)[0].double(), torch.tensor([ids]))
    want = [packed(layer[0]) for layer in maps]
    script = """([name, ids, want]) => {
      const found = [];
      lm.shipped(name).model.forward(ids, {
        watch: (stage, layer, heads) => stage === "attention" && found.push(heads.flatMap((h) => [...h])),
      });
      return Math.max(...found.map((heads, layer) => apart(heads, floats(want[layer]))));
    }"""
    assert page.evaluate(script, [name, ids, want]) < 1e-6


def test_a_model_whose_tokens_are_bytes(page: Page) -> None:
    """It has no merges, and other special tokens than the end of a text."""
    _, tokenizer = load_shipped("tasks")
    ids = [0, *tokenizer.encode("add:47+38=")]
    assert page.evaluate(ALL, ["tasks", ids, packed(wanted("tasks", ids))]) < 5e-5
    script = """(texts) => {
      const { tokenizer } = lm.shipped("tasks");
      return texts.map((text) => { const ids = tokenizer.encode(text); return [ids, tokenizer.decode(ids)]; });
    }"""
    strings = ["brackets:([{=", "é\n <|im_start|> x  y", "漢字🙂"]
    for text, found in zip(strings, page.evaluate(script, strings), strict=True):
        assert found == [tokenizer.encode(text), text]


# -------------------------------------------------------------------------------- the kernel

#: Rows O, columns I. All but the last lie beside each other; that one fills a memory of its own.
MATRICES = ((4, 4), (1, 4), (13, 8), (7, 6), (384, 128), (261, 128), (3, 1), (130, 516), (29, 532))


@pytest.mark.parametrize("rows", [1, 2, 3, 4])
def test_the_kernel(page: Page, rows: int) -> None:
    """Beside torch, with a bias and without; the matrices stay as they are."""
    weights = [normal(*size).float() for size in MATRICES]
    biases = [normal(O, seed=1).float() for O, _ in MATRICES]
    inputs = [normal(rows, I, seed=2).float() for _, I in MATRICES]
    sums = [(x.double() @ w.double().T) for x, w in zip(inputs, weights, strict=True)]
    want = [[packed(y), packed(y + b)] for y, b in zip(sums, biases, strict=True)]
    script = """([sizes, weights, biases, inputs, want]) => {
      const tensors = sizes.map((shape, i) => ({ shape, data: floats(weights[i]) }));
      lm.kernel.place({ last: tensors.at(-1) });
      lm.kernel.place({ ...tensors.slice(0, -1), again: tensors[0], bias: { shape: [4], data: new Float32Array(4) } });
      return tensors.map((weight, i) => {
        const [x, bias] = [floats(inputs[i]), { data: floats(biases[i]) }];
        const kernel = lm.kernel;
        const far = [lm.linear(x, weight), lm.linear(x, weight, bias)].map((y, j) => apart(y, floats(want[i][j])));
        const fast = lm.kernel.of(weight) !== undefined;
        lm.kernel = null;
        far.push(apart(lm.linear(x, weight), floats(want[i][0])), apart(weight.data, floats(weights[i])));
        lm.kernel = kernel;
        return [fast, ...far];
      });
    }"""
    given = [
        [list(size) for size in MATRICES],
        *([*map(packed, x)] for x in (weights, biases, inputs)),
    ]
    for (_, I), (fast, *far, changed) in zip(
        MATRICES, page.evaluate(script, [*given, want]), strict=True
    ):
        assert fast == (I % 4 == 0)
        assert max(far) < 1e-4 and changed == 0


@pytest.mark.parametrize(
    ("T", "S", "D", "n_kv_head"), [(1, 1, 4, 1), (3, 6, 4, 2), (2, 257, 32, 1)]
)
@pytest.mark.parametrize("broken", [{}, {"noMask": True, "noScale": True}])
def test_attention_by_the_kernel(page: Page, T: int, S: int, D: int, n_kv_head: int, broken: dict[str, bool]) -> None:  # fmt: skip
    """Beside the loops; not where numbers are float64, or too many."""
    script = """([q, k, v, sizes, broken]) => {
      const { kernel } = lm;
      const [width, D] = [sizes.n_kv_head * sizes.head_dim, sizes.head_dim];
      const both = [kernel, null].map((way) => {
        lm.kernel = way;
        return lm.attention(floats(q), floats(k), floats(v), sizes, broken);
      });
      lm.kernel = kernel;
      const long = new Float32Array(200_000);
      return {
        far: [apart(both[0].y, both[1].y), ...both[0].weights.map((one, h) => apart(one, both[1].weights[h]))],
        fast: [floats(k), doubles(k.slice(0, 0)), long].map((k) => kernel.attend(k, k, width, D) !== undefined),
      };
    }"""
    sizes = {"n_head": 4, "n_kv_head": n_kv_head, "head_dim": D}
    made = [packed(normal(*size, seed=i)) for i, size in enumerate([(T, 4 * D), *[(S, n_kv_head * D)] * 2])]  # fmt: skip
    found = page.evaluate(script, [*made, sizes, broken])
    assert max(found["far"]) < 1e-5
    assert found["fast"] == [True, False, False]


def test_two_models_with_the_kernel_and_without(page: Page) -> None:
    """In turns, and each of them where it was before; a weight that changes is seen at once."""
    script = """([names, ids]) => {
      const models = names.map((name) => lm.shipped(name).model);
      const kernel = lm.kernel;
      const logits = () => models.map((model) => model.forward(ids, { all: true }));
      const [first, second] = [logits(), logits()];
      lm.kernel = null;
      const plain = logits();
      lm.kernel = kernel;
      const { headWeight } = models[0];
      headWeight.data[7 * headWeight.shape[1]] += 1;
      const moved = logits();
      headWeight.data[7 * headWeight.shape[1]] -= 1;
      return {
        held: models.every(({ headWeight }) => kernel.of(headWeight)),
        rounded: kernel.of(lm.rounded(headWeight, 4)) === undefined,
        same: first.map((one, i) => apart(one, second[i])),
        plain: first.map((one, i) => apart(one, plain[i])),
        moved: first.map((one, i) => apart(one, moved[i])),
      };
    }"""
    found = page.evaluate(script, [MODELS, ids_of(9)])
    assert found["held"] and found["rounded"]
    assert found["same"] == [0, 0]
    assert all(0 < far < 5e-5 for far in found["plain"])
    assert found["moved"][0] > 0.01 and found["moved"][1] == 0


def test_the_kernel_is_small(page: Page) -> None:
    """As the page on it says."""
    assert 400 < page.evaluate("() => lm.kernel.bytes.length") < 450
    assert page.evaluate("() => WebAssembly.validate(lm.kernel.bytes)")


def test_a_model_without_room_stays_plain(page: Page) -> None:
    script = """() => {
      const { Memory } = WebAssembly;
      WebAssembly.Memory = function () { throw new RangeError("no memory"); };
      const weight = { shape: [4, 4], data: new Float32Array(16).fill(1) };
      lm.kernel.place({ weight });
      WebAssembly.Memory = Memory;
      return [lm.kernel.of(weight) === undefined, ...lm.linear(new Float32Array(4).fill(1), weight)];
    }"""
    assert page.evaluate(script) == [True, 4, 4, 4, 4]


# ----------------------------------------------------------------------------- the tokenizer

KINDS = (
    "abc xyz's 12 it'll",
    "".join(map(chr, range(32, 127))),
    "éñß漢字かな한글עברית🙂👩‍👩‍👧\u0301\u200d",
    "\n\t\r \u0085\ufeff\u00a0\u2003\u3000\u2028\u180e\x1c a1",
    "<|endoftext|> def f(x):\n    return",
)


def texts() -> list[str]:
    chance = random.Random(0)

    def one(kind: str) -> str:
        return "".join(chance.choice(kind) for _ in range(chance.randint(0, 40)))

    return [one(KINDS[i % len(KINDS)]) for i in range(2000)]


def test_the_tokenizer_on_random_texts(page: Page) -> None:
    _, tokenizer = load_shipped()
    strings = texts()
    script = """([name, texts]) => {
      const { tokenizer } = lm.shipped(name);
      return texts.map((text) => { const ids = tokenizer.encode(text); return [ids, tokenizer.decode(ids)]; });
    }"""
    for text, (ids, back) in zip(
        strings, page.evaluate(script, ["gpt2-docs", strings]), strict=True
    ):
        assert ids == tokenizer.encode(text), repr(text)
        assert back == text


@pytest.mark.slow
def test_the_tokenizer_on_every_character(page: Page) -> None:
    """Between letters, digits and blanks: which class a character belongs to decides the words."""
    _, tokenizer = load_shipped()
    points = [p for p in range(0x110000) if not 0xD800 <= p < 0xE000]  # halves of pairs
    script = """(points) => {
      const { tokenizer } = lm.shipped("gpt2-docs");
      return points.map((point) => {
        tokenizer.words.clear();
        let sum = 0;
        const c = String.fromCodePoint(point);
        for (const id of tokenizer.encode(`a${c}1 ${c} ${c}b`)) sum = (Math.imul(sum, 31) + id) | 0;
        return sum;
      });
    }"""
    for begin in range(0, len(points), 50_000):
        some = points[begin : begin + 50_000]
        encoded = tokenizer.backend.encode_batch_fast(
            [f"a{chr(p)}1 {chr(p)} {chr(p)}b" for p in some], add_special_tokens=False
        )
        sums = []
        for found in encoded:
            total = 0
            for id_ in found.ids:
                total = (total * 31 + id_) & 0xFFFFFFFF
            sums.append(total - (1 << 32) if total >= 1 << 31 else total)
        assert page.evaluate(script, some) == sums


# -------------------------------------------------------------------------- sampler, switches


@pytest.mark.parametrize(
    "options",
    [
        {}, {"temperature": 0.0}, {"temperature": 0.7}, {"top_k": 5}, {"top_p": 0.8},
        {"temperature": 1.5, "top_k": 40, "top_p": 0.9}, {"top_k": 1}, {"top_p": 0.01},
    ],
)  # fmt: skip
def test_the_sampler(page: Page, options: dict[str, Any]) -> None:
    logits = torch.stack([wanted("gpt2-docs", ids_of(9, seed))[-1] for seed in range(8)])
    logits[7] = logits[7].round()  # ties
    sampler = Sampler(**options)
    want = sampler.logits(logits, torch.zeros_like(logits, dtype=torch.bool))
    u = torch.rand(8, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    script = """([logits, options, u]) => {
      const bent = logits.map((row) => lm.sampled(floats(row), options));
      return [
        bent.map((row) => [...row].map((x) => (x === -Infinity ? null : x))),
        bent.map((row, i) => options.temperature === 0 ? lm.argmax(row) : lm.draw(row, u[i])),
      ];
    }"""
    given = [[packed(row) for row in logits], options, u.tolist()]
    rows, chosen = page.evaluate(script, given)
    found = torch.tensor([[-np.inf if x is None else x for x in row] for row in rows])
    if "top_p" in options:  # which of equal ones stays is nobody's rule
        found, want = found[:7], want[:7]
    torch.testing.assert_close(found, want.to(found.dtype), rtol=1e-5, atol=1e-5)
    greedy = sampler.temperature == 0
    tokens = want.argmax(-1) if greedy else draw(want, u[: len(want)])
    assert chosen[: len(want)] == tokens.tolist()


@pytest.mark.parametrize("name", MODELS)
def test_each_switch_moves_the_logits(page: Page, name: str) -> None:
    script = """([name, ids]) => {
      const { model } = lm.shipped(name);
      const whole = model.forward(ids);
      const moved = {};
      for (const part of ["noPositions", "noScale", "noMask"]) {
        model.broken = { [part]: true };
        moved[part] = apart(model.forward(ids), whole);
        model.broken = {};
      }
      model.silent = new Set(["2.1"]);
      moved.silent = apart(model.forward(ids), whole);
      model.silent = new Set();
      moved.none = apart(model.forward(ids), whole);
      return moved;
    }"""
    moved = page.evaluate(script, [name, ids_of(20)])
    assert moved.pop("none") == 0
    assert min(moved.values()) > 0.01, moved


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_rounding(page: Page, bits: int) -> None:
    weight = load_shipped("gpt2-docs")[0].backbone.wte.weight.detach()[:64]
    top = 2 ** (bits - 1) - 1
    scale = weight.abs().amax(1, keepdim=True) / top
    want = (weight / scale).round() * scale
    if bits == 8:
        torch.testing.assert_close(want, Int8Weight.quantize(weight).dequantize())
    script = """([weight, shape, bits, want]) =>
      apart(lm.rounded({ shape, data: floats(weight) }, bits).data, floats(want))"""
    given = [packed(weight), list(weight.shape), bits, packed(want)]
    assert page.evaluate(script, given) < 1e-7


@pytest.mark.parametrize("name", MODELS)
def test_costs(page: Page, name: str) -> None:
    """Bits of each token after the first: the loss of torch."""
    ids = ids_of(40)
    want = F.cross_entropy(wanted(name, ids)[:-1], torch.tensor(ids[1:]), reduction="none")
    script = """([name, ids, want]) => apart(Float32Array.from(
      lm.costs(lm.shipped(name).model.forward(ids, { all: true }), ids)), floats(want))"""
    assert page.evaluate(script, [name, ids, packed(want / math.log(2))]) < 1e-4


@pytest.mark.parametrize("name", MODELS)
def test_moved_positions(page: Page, name: str) -> None:
    ids = ids_of(20)
    model, _ = load_shipped(name)
    with torch.no_grad():
        want = model.eval()(torch.tensor([ids]), positions=torch.arange(20)[None] + 37)[0, -1]
    script = """([name, ids, want]) =>
      apart(lm.shipped(name).model.forward(ids, { shift: 37 }), floats(want))"""
    assert page.evaluate(script, [name, ids, packed(want)]) < 5e-5


@pytest.mark.parametrize("name", MODELS)
def test_a_silent_head(page: Page, name: str) -> None:
    """Layer 2, head 1: its share of the input of the output projection is 0."""
    ids = ids_of(20)
    model, _ = load_shipped(name)
    width = model.config.head_dim

    def silence(module: Any, given: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        heads = given[0].clone()
        heads[..., width : 2 * width] = 0
        return (heads,)

    layer = attention_layers(model)[2]
    output: Any = layer.c_proj if name == "gpt2-docs" else layer.o_proj
    output.register_forward_pre_hook(silence)
    with torch.no_grad():
        want = model.eval()(torch.tensor([ids]))[0, -1]
    script = """([name, ids, want]) => {
      const { model } = lm.shipped(name);
      model.silent = new Set(["2.1"]);
      const found = apart(model.forward(ids), floats(want));
      model.silent = new Set();
      return found;
    }"""
    assert page.evaluate(script, [name, ids, packed(want)]) < 5e-5


STORIES = (
    ("The key is in the {}. Where is the key? The key is in the", "hall", "kitchen"),
    ("Mia is in the hall. {} has the key. Who has the key?", "Mia", "Tom"),
)


@pytest.mark.parametrize(("story", "first", "second"), STORIES)
def test_one_state_of_another_run(page: Page, story: str, first: str, second: str) -> None:
    """At each token, in front of each block; and what is written after it, with a cache."""
    model, tokenizer = load_shipped("worlds")
    ids, other = (tokenizer.start(story.format(word)) for word in (first, second))
    T, more = len(ids), tokenizer.encode(" kitchen. Where is the key?")
    rows = torch.tensor([[*ids, *more]]).expand(T, -1)
    each = torch.eye(T, rows.shape[1], dtype=torch.bool)
    sites = [Site("stream", layer) for layer in range(model.config.n_layer)]
    _, states = activations(model, torch.tensor([[*other, *more]]), sites)
    with torch.no_grad():
        want = [run(model, rows, {site: put(states[site], each)}) for site in sites]
    assert min((one[:, T - 1] - want[0][0, T - 1]).abs().max() for one in want) > 1, "it matters"
    script = """([ids, other, more, want]) => {
      const { model } = lm.shipped("worlds");
      const { n_embd, vocab_size: V } = model.config;
      const { states } = lm.streams(model, other);
      let most = 0;
      want.forEach((rows, layer) => rows.forEach((row, token) => {
        const cache = model.cache();
        const first = model.forward(ids, { cache, watch: lm.put(states[layer], layer, token, n_embd) });
        row = floats(row);
        most = Math.max(most, apart(first, row.subarray(0, V)), apart(model.forward(more, { cache }), row.subarray(V)));
      }));
      return most;
    }"""
    ends = [[packed(row[[T - 1, -1]]) for row in one] for one in want]
    assert page.evaluate(script, [ids, other, more, ends]) < 5e-5


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
@pytest.mark.parametrize("name", MODELS)
def test_a_rounded_model(page: Page, name: str, bits: int) -> None:
    """Every matrix, row by row as (out, in)."""
    ids = ids_of(20)
    model, _ = load_shipped(name)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() == 2:
                step = weight.abs().amax(1, keepdim=True) / (2 ** (bits - 1) - 1)
                weight.copy_((weight / step).round() * step)
        want = model.eval()(torch.tensor([ids]))[0, -1]
    script = """([name, ids, bits, want]) => {
      const { model } = lm.shipped(name);
      const whole = model.tensors;
      model.tensors = Object.fromEntries(Object.entries(whole).map(([name, tensor]) =>
        [name, tensor.shape.length === 2 ? lm.rounded(tensor, bits) : tensor]));
      const found = apart(model.forward(ids), floats(want));
      model.tensors = whole;
      return found;
    }"""
    assert page.evaluate(script, [name, ids, bits, packed(want)]) < 5e-5


# ---------------------------------------------------------------------- training, in float64


def packed64(x: torch.Tensor) -> str:
    return base64.b64encode(x.detach().double().contiguous().numpy().tobytes()).decode()


def unpacked64(text: str, like: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(np.frombuffer(base64.b64decode(text)).copy()).view(like.shape)


def tensors64(named: dict[str, torch.Tensor]) -> dict[str, tuple[list[int], str]]:
    return {name: (list(x.shape), packed64(x)) for name, x in named.items()}


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


IDS = torch.tensor([3, 0, 9, 3, 10, 3, 7])
T, C, HEADS = len(IDS), 12, 3


def causal_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    heads = (x.view(T, HEADS, -1).transpose(0, 1) for x in (q, k, v))
    return F.scaled_dot_product_attention(*heads, is_causal=True).transpose(0, 1).reshape(T, C)


#: An operation: what it is made of, what it is in torch, and what the way back returns.
OPERATIONS: dict[str, tuple[dict[str, torch.Tensor], Callable[..., torch.Tensor], str]] = {
    "linear": (
        {"x": normal(T, C), "weight": normal(13, C), "bias": normal(13)},
        F.linear, "{ x: lm.backward.linear(dy, x.data, weight, bias) }",
    ),
    "linear, even sizes": (
        {"input": normal(8, C), "weight": normal(8, C)},
        F.linear, "{ input: lm.backward.linear(dy, input.data, weight) }",
    ),
    "embedding": (
        {"weight": normal(11, C)},
        lambda weight: F.embedding(IDS, weight), "{ none: lm.backward.embedding(dy, ids, weight) }",
    ),
    "layerNorm": (
        {"x": 3 * normal(T, C) + 1, "weight": normal(C), "bias": normal(C, seed=1)},
        lambda x, weight, bias: F.layer_norm(x, (C,), weight, bias, 1e-5),
        "{ x: lm.backward.layerNorm(dy, x.data, weight, bias, 1e-5) }",
    ),
    "geluNew": (
        {"x": 3 * normal(T, C)},
        lambda x: F.gelu(x, approximate="tanh"), "{ x: lm.backward.geluNew(dy, x.data) }",
    ),
    "attention": (
        {"q": 2 * normal(T, C), "k": normal(T, C, seed=1), "v": normal(T, C, seed=2)},
        causal_attention,
        """(([q, k, v]) => ({ q, k, v }))(lm.backward.attention(dy, q.data, k.data, v.data,
          lm.attention(q.data, k.data, v.data, heads).weights, heads))""",
    ),
    "crossEntropy": (
        {"x": 5 * normal(T, 11)},
        lambda x: 0.3 * F.cross_entropy(x, IDS),
        "(({ loss, dlogits }) => ({ x: dlogits, loss: [loss] }))(lm.crossEntropy(x.data, ids, 0.3))",
    ),
}  # fmt: skip


@pytest.mark.parametrize("operation", OPERATIONS)
def test_the_way_back_through_an_operation(page: Page, operation: str) -> None:
    """Slopes of weights are added to those that are there."""
    given, forward, call = OPERATIONS[operation]
    leaves = {name: x.clone().requires_grad_() for name, x in given.items()}
    y = forward(**leaves)
    dy = torch.ones_like(y) if y.dim() == 0 else normal(*y.shape, seed=5)
    y.backward(dy)
    want = {"loss": y.detach()} if operation == "crossEntropy" else {}
    for name, x in leaves.items():
        assert x.grad is not None
        want[name] = x.grad + 0.5 if name in ("weight", "bias") else x.grad
    script = f"""([given, dy, ids, want]) => {{
      given = tensors(given);
      dy = doubles(dy);
      const heads = {{ n_head: {HEADS}, n_kv_head: {HEADS}, head_dim: {C // HEADS} }};
      const {{ {", ".join(given)} }} = given;
      for (const tensor of Object.values(given)) tensor.grad = new Float64Array(tensor.data.length).fill(0.5);
      const found = {call};
      return Object.entries(want).map(([name, slopes]) => [name, apart(found[name] ?? given[name].grad, doubles(slopes))]);
    }}"""
    packed = {name: packed64(x) for name, x in want.items()}
    found = page.evaluate(script, [tensors64(given), packed64(dy), IDS.tolist(), packed])
    assert all(apart < 1e-12 for _, apart in found), found


def small_gpt2() -> GPT2LMHeadModel:
    """Odd sizes, and weights large enough to show a mistake."""
    config = GPT2Config(
        vocab_size=11, block_size=9, n_layer=2, n_head=HEADS, n_embd=C, initializer_range=0.25,
        embd_pdrop=0.0, resid_pdrop=0.0, attn_pdrop=0.0, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = GPT2LMHeadModel(config).double()
        for weight in model.parameters():
            if weight.dim() == 1:
                weight.data += 0.25 * torch.randn_like(weight)
    return model


def published(model: GPT2LMHeadModel) -> dict[str, torch.Tensor]:
    """The weights as files have them, (in, out)."""
    turned = ("c_attn.weight", "c_proj.weight", "c_fc.weight")
    state = {name: x.detach() for name, x in model.named_parameters()}
    return {name: x.T if name.endswith(turned) else x for name, x in state.items()}


MODEL = """const opened = (sizes, weights) => new lm.GPT2LMHeadModel(
  { ...sizes, n_positions: sizes.block_size, layer_norm_epsilon: 1e-5 }, tensors(weights));"""
SIZES = ("n_layer", "n_head", "n_embd", "vocab_size", "block_size")


def opening(model: GPT2LMHeadModel) -> list[Any]:
    return [{name: getattr(model.config, name) for name in SIZES}, tensors64(published(model))]


def test_logits_in_float64(page: Page) -> None:
    """In one pass and with the cache."""
    model = small_gpt2()
    with torch.no_grad():
        want = packed64(model.eval()(IDS[None])[0])
    script = f"""([sizes, weights, ids, want]) => {{
      {MODEL}
      const model = opened(sizes, weights);
      const cache = model.cache();
      const one = ids.flatMap((id) => [...model.forward([id], {{ cache }})]);
      return [apart(model.forward(ids, {{ all: true }}), doubles(want)), apart(one, doubles(want))];
    }}"""
    assert max(page.evaluate(script, [*opening(model), IDS.tolist(), want])) < 1e-12


def test_the_slopes_of_a_step(page: Page) -> None:
    """Of every weight, from the mean loss of three rows."""
    model = small_gpt2()
    rows = torch.randint(11, (3, T + 1), generator=torch.Generator().manual_seed(1))
    loss = F.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())
    loss.backward()
    script = f"""([sizes, weights, rows, loss, want]) => {{
      {MODEL}
      const model = opened(sizes, weights);
      new lm.AdamW(Object.values(model.tensors));
      let sum = 0;
      for (const row of rows) sum += lm.forwardAndBackward(model, row.slice(0, -1), row.slice(1), 1 / rows.length);
      return [["loss", Math.abs(sum - loss)], ...Object.entries(want).map(([name, slopes]) =>
        [name, apart(model.tensors[name].grad, doubles(slopes))])];
    }}"""
    want = {name.removeprefix("transformer."): packed64(x.grad)
            for name, x in model.named_parameters() if x.grad is not None}  # fmt: skip
    assert len(want) == 4 + 2 * 12
    found = page.evaluate(script, [*opening(model), rows.tolist(), loss.item(), want])
    assert all(apart < 1e-13 for _, apart in found), found


@pytest.mark.parametrize("most", [1e9, 0.5])
def test_steps_of_adamw(page: Page, most: float) -> None:
    """Clipped and not; the learning rate changes."""
    weights = [normal(5, 3), normal(7)]
    slopes = [[normal(*w.shape, seed=step) for w in weights] for step in range(6)]
    parameters = [w.clone().requires_grad_() for w in weights]
    optimizer = torch.optim.AdamW(parameters, betas=(0.9, 0.95))
    rates = [0.1 / (step + 1) for step in range(6)]
    norms = []
    for rate, step in zip(rates, slopes, strict=True):
        for p, slope in zip(parameters, step, strict=True):
            p.grad = slope.clone()
        norms.append(torch.nn.utils.clip_grad_norm_(parameters, most).item())
        optimizer.param_groups[0]["lr"] = rate
        optimizer.step()
    script = """([weights, slopes, rates, most, norms, want]) => {
      const all = Object.values(tensors(weights));
      const optimizer = new lm.AdamW(all);
      const found = rates.map((rate, step) => {
        optimizer.zeroGrad();
        all.forEach((tensor, i) => doubles(slopes[step][i]).forEach((x, j) => (tensor.grad[j] += x)));
        const norm = optimizer.clip(most);
        optimizer.step(rate);
        return Math.abs(norm - norms[step]);
      });
      return Math.max(...found, ...all.map((tensor, i) => apart(tensor.data, doubles(want[i]))));
    }"""
    given = [
        tensors64({str(i): w for i, w in enumerate(weights)}),
        [[packed64(x) for x in step] for step in slopes],
        rates, most, norms, [packed64(p) for p in parameters],
    ]  # fmt: skip
    assert page.evaluate(script, given) < 1e-13


RUN = """([seed, steps, rate]) => {
  const run = new lm.Run(lm.widgets.train.sizes, lm.shipped("stories").texts.english, { seed });
  const state = () => Object.fromEntries(Object.entries(run.model.tensors).map(([name, { data }]) => [name, packed(data)]));
  const before = state();
  const rows = [];
  const drawn = run.row.bind(run);
  run.row = () => (rows.push(drawn()), rows.at(-1));
  for (let step = 0; step < steps; step++) for (const _ of run.step(rate));
  const ids = rows[0][0];
  return { before, after: state(), rows, losses: run.losses, letters: run.tokenizer.letters,
    ids, logits: packed(run.model.forward(ids, { all: true })) };
}"""


@pytest.mark.parametrize("steps", [24, pytest.param(100, marks=pytest.mark.slow)])
def test_steps_are_those_of_torch(page: Page, steps: int) -> None:
    """The widget's own run: every loss and, at the end, every weight and the logits."""
    found = page.evaluate(RUN, [3, steps, 0.01])
    text = training.texts()["english"]
    assert sorted(found["letters"]) == sorted(set(text))
    model = GPT2LMHeadModel(training.config(len(found["letters"]))).double()
    named = {name.removeprefix("transformer."): p for name, p in model.named_parameters()}
    assert set(named) == set(found["before"])
    with torch.no_grad():
        for name, p in named.items():
            p.copy_(unpacked64(found["before"][name], p))
    rows = torch.tensor(found["rows"]).view(steps, 8, 2, -1)  # tokens, and the one after each
    decoded = "".join(found["letters"][i] for i in rows[0, 0, 0].tolist())
    assert decoded in text and torch.equal(rows[:, :, 0, 1:], rows[:, :, 1, :-1])
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95))
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = 0.01 * min(1, (step + 1) / 20)
        loss = F.cross_entropy(model(rows[step, :, 0]).flatten(0, 1), rows[step, :, 1].flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        assert abs(loss.item() - found["losses"][step]) < 1e-11, step
    if steps == 100:
        assert found["losses"][0] > 3.4 and sum(found["losses"][-10:]) / 10 < 1.8, "it learns"
    for name, p in named.items():
        # the bias of keys moves all scores of a query alike: its slope is rounding, and AdamW
        # divides it by 1e-8
        bound = 1e-8 if name.endswith("c_attn.bias") else 1e-11
        assert (p - unpacked64(found["after"][name], p)).abs().max() < bound, name
    with torch.no_grad():
        logits = model(torch.tensor([found["ids"]]))[0]
    assert (logits - unpacked64(found["logits"], logits)).abs().max() < 1e-9


def test_rare_characters_are_one_token(page: Page) -> None:
    script = """(text) => {
      const tokenizer = new lm.Characters(text);
      return [tokenizer.letters.length, tokenizer.decode(tokenizer.encode(text))];
    }"""
    common = [chr(0x4E00 + i) for i in range(255)]
    text = "".join(common * 2)
    assert page.evaluate(script, text + "🙂") == [256, text + "🙂"]
    assert page.evaluate(script, text + "🙂" + "éa") == [256, text + "\ufffd" * 3]


# -------------------------------------------------------------------------- planted mistakes

Check = Callable[[Page], None]


def logits_check(page: Page) -> None:
    for name in MODELS:
        test_logits_in_one_pass_and_token_by_token(page, name, 17)
        test_logits_after_an_edit_that_keeps_a_prefix(page, name)


def costs_check(page: Page) -> None:
    test_costs(page, "gpt2-docs")


def silence_check(page: Page) -> None:
    test_a_silent_head(page, "gpt2-docs")


def shift_check(page: Page) -> None:
    test_moved_positions(page, "gpt2-docs")


def bits_check(page: Page) -> None:
    test_a_rounded_model(page, "gpt2-docs", 4)


def move_check(page: Page) -> None:
    test_one_state_of_another_run(page, *STORIES[1])


def operations_check(page: Page) -> None:
    for operation in OPERATIONS:
        test_the_way_back_through_an_operation(page, operation)


def adamw_check(page: Page) -> None:
    test_steps_of_adamw(page, 0.5)


def run_check(page: Page) -> None:
    test_steps_are_those_of_torch(page, 3)


def kernel_check(page: Page) -> None:
    test_the_kernel(page, 2)


CHECKS = (
    *(kernel_check, logits_check, costs_check, silence_check, shift_check, bits_check, move_check),
    *(operations_check, test_the_slopes_of_a_step, adamw_check, run_check),
)


def control(page: Page) -> None:
    """With nothing wrong all checks pass; this one fails behind them."""
    for check in CHECKS:
        check(page)
    raise AssertionError


MISTAKES: dict[str, tuple[str, str, str, Check]] = {
    "no scale": ("attention", "1 / Math.sqrt(D)", "1", logits_check),
    "one key too few": ("attention", "S - T + t + 1", "Math.max(1, S - T + t)", logits_check),
    "cache off by one": (
        "attention", "held.k.set(k, this.length * width)",
        "held.k.set(k, Math.max(0, this.length - 1) * width)", logits_check,
    ),
    "a wrong head": ("attention", "Math.floor((h * n_kv_head) / H)", "h % n_kv_head", logits_check),
    "a stale prefix": ("generate", "ids[same] === this.ids[same]", "true", logits_check),
    "positions begin anew": ("qwen2", "cache.length + t + shift", "t + shift", logits_check),
    "JavaScript's blanks": (
        "tokenizer", '"\\\\p{White_Space}"', '"\\\\s"', test_the_tokenizer_on_random_texts,
    ),
    "the first pair, not the best": (
        "tokenizer", "Math.min(first, ", "first < Infinity ? first : (",
        test_the_tokenizer_on_random_texts,
    ),
    "costs of the token itself": ("generate", "ids.slice(1).map", "ids.map", costs_check),
    "half a head is silent": ("gpt2", "y.fill(0, from, from + head_dim)", "y.fill(0, from, from + head_dim / 2)", silence_check),
    "positions of GPT-2 do not move": ("gpt2", "cache.length + t + shift", "cache.length + t", shift_check),
    "rounded down": ("tensor", "step * roundHalfEven(", "step * Math.floor(", bits_check),
    "a state one block late": ("widgets/move", "block === layer - 1", "block === layer", move_check),
    "a state of the token before": ("widgets/move", "), token * C)", "), Math.max(0, token - 1) * C)", move_check),
    "a sign": ("gradients", "shift - n[c] * stretch", "shift + n[c] * stretch", operations_check),
    "slopes that replace each other": ("gradients", "table.grad[id * C + c] +=", "table.grad[id * C + c] =", operations_check),
    "the edge of a product": ("gradients", "Math.min(c + 4, C)", "Math.min(c + 3, C)", operations_check),
    "the way around attention": ("training", "return lm.add(dattended, backward.layerNorm(dh, x, ...of(\"ln_1\"), config.eps));", "return backward.layerNorm(dh, x, ...of(\"ln_1\"), config.eps);", test_the_slopes_of_a_step),
    "a head that is not tied": ("training", "backward.linear(dlogits, h, model.headWeight)", "backward.linear(dlogits, h, { ...model.headWeight, grad: new Float64Array(1e5) })", test_the_slopes_of_a_step),
    "no correction of the means": ("training", "mean[i] / correct1", "mean[i]", adamw_check),
    "decay that AdamW divides": ("training", "this.weight_decay * data[i] + direction", "direction", adamw_check),
    "slopes of the step before": ("training", "grad.fill(0)", "grad.fill(0, 1)", run_check),
    "no warm-up": ("training", "Math.min(1, (this.losses.length + 1) / this.warmup)", "1", run_check),
    "a lane twice": ("kernel", "0xfd, 0x1f, 3", "0xfd, 0x1f, 2", kernel_check),
    "a row twice": ("kernel", "addProducts(SUM + 2, W2)", "addProducts(SUM + 2, W1)", kernel_check),
    "columns left over": ("kernel", "shape[1] % 4 === 0", "true", kernel_check),
    "y over the weights": ("kernel", "let at = widest + tallest", "let at = widest", kernel_check),
    "keys of the first head": ("kernel", "4 * (atK + from)", "4 * atK", logits_check),
    "a value too many": ("kernel", "4 * (D + weights.length)", "4 * (D + weights.length + 1)", logits_check),
    "nothing at all": ("tensor", "const lm = {}", "const lm = {}", lambda page: control(page)),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_planted_mistake_is_caught(browser: Browser, address: str, mistake: str) -> None:
    name, right, wrong, check = MISTAKES[mistake]
    source = (widgets.LIVE / f"{name}.js").read_text(encoding="utf-8")
    assert right in source

    def serve(route: Route) -> None:
        route.fulfill(body=source.replace(right, wrong), content_type="text/javascript")

    context = new_context(browser, "light", 1280)
    try:
        broken = context.new_page()
        broken.route(f"**/{name}.js", serve)
        broken.goto(address)
        with pytest.raises(AssertionError):
            check(broken)
    finally:
        context.close()
