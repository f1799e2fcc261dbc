/* Fewer bits: the matrices are rounded, and the text costs more. */
"use strict";

lm.widgets.bits = function (place, { model, tokenizer }) {
  const CHOICES = [16, 8, 6, 5, 4, 3, 2];
  const controls = new lm.Controls(place, tokenizer, { text: place.dataset.prompt, bits: [16, 2, 16, 1] }, show);
  if (!CHOICES.includes(controls.bits)) controls.bits = 16;
  const whole = model.tensors;
  const rounded = new Map(); // all tensors, by bits
  const buttons = CHOICES.map((bits) => lm.button(`${bits} bits`, () => controls.change({ bits })));
  const next = lm.bars();
  let full = {}; // the text with weights of 16 bits
  place.append(controls.field("A text"),
    lm.element("div", { class: "live-buttons", role: "group", "aria-label": "Bits of a weight" }, ...buttons),
    place.querySelector(".live-status"), lm.element("p", {}, "What it would say next:"), next,
    lm.element("p", { class: "live-note" },
      "Each row of a matrix has a step of its own; with b bits a weight is one of 2^b − 1 multiples of it."));

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
    if (full.key !== String(ids)) full = { ...(controls.bits === 16 ? now : read(ids, 16)), key: String(ids) };
    const bytes = (tensor) =>
      controls.bits === 16 || !isMatrix(tensor) ? 2 * tensor.data.length
        : (tensor.data.length * controls.bits) / 8 + 2 * tensor.shape[0]; // a step for each row
    const megabytes = Object.values(whole).reduce((sum, tensor) => sum + bytes(tensor), 0) / 1e6;
    buttons.forEach((button, i) => button.setAttribute("aria-pressed", String(CHOICES[i] === controls.bits)));
    controls.say(`${megabytes.toFixed(1)} MB of weights.` + (ids.length < 2 ? "" :
      ` On average, a token of this text surprises the model by ${now.cost.toFixed(3)} bits; with 16-bit weights by ${full.cost.toFixed(3)}.`));
    lm.replace(next, ...lm.likeliest(tokenizer, now.next, 5));
  }

  show();
};
