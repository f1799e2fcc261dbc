/* Fewer bits: the matrices are rounded, and the text costs more. */
"use strict";

lm.widgets.bits = function (place, { model, tokenizer }) {
  const CHOICES = [16, 8, 6, 5, 4, 3, 2];
  const controls = new lm.Controls(place, tokenizer, { text: place.dataset.prompt, bits: [16, 2, 16, 1] }, show);
  if (!CHOICES.includes(controls.bits)) controls.bits = 16;
  const whole = model.tensors;
  const rounded = new Map(); // all tensors, by bits
  const buttons = CHOICES.map((bits) => lm.button(`${bits} bits`, () => controls.change({ bits })));
  const said = place.querySelector(".live-status");
  const next = lm.bars();
  place.append(controls.field("A text"),
    lm.element("div", { class: "live-buttons", role: "group", "aria-label": "Bits of a weight" }, ...buttons),
    said, lm.element("p", {}, "What it would say next:"), next);

  const isMatrix = ({ shape }) => shape.length === 2;

  function inBits(bits) {
    if (!rounded.has(bits)) {
      const round = (tensor) => (bits < 16 && isMatrix(tensor) ? lm.rounded(tensor, bits) : tensor);
      rounded.set(bits, Object.fromEntries(
        Object.entries(whole).map(([name, tensor]) => [name, round(tensor)])));
    }
    return rounded.get(bits);
  }

  /* What a token of the text costs, and what comes next. */
  function read(ids, bits) {
    model.tensors = inBits(bits);
    const V = model.config.vocab_size;
    const logits = model.forward(ids, { all: true });
    model.tensors = whole;
    return { cost: lm.mean(lm.costs(logits, ids)), next: lm.softmax(logits.subarray(-V)) };
  }

  function show() {
    const ids = controls.ids(64);
    const now = read(ids, controls.bits);
    const full = controls.bits === 16 ? now : read(ids, 16);
    const megabytes = Object.values(whole).reduce(
      (sum, tensor) => sum + (tensor.data.length * (isMatrix(tensor) ? controls.bits : 16)) / 8e6, 0);
    buttons.forEach((button, i) => button.setAttribute("aria-pressed", String(CHOICES[i] === controls.bits)));
    said.textContent = `${megabytes.toFixed(1)} MB of weights.` + (ids.length < 2 ? "" :
      ` On average, a token of this text has the surprise ${now.cost.toFixed(3)}; with weights of 16 bits ${full.cost.toFixed(3)}.`);
    lm.replace(next, ...lm.likeliest(tokenizer, now.next, 5));
  }

  show();
};
