/* Fewer bits: the matrices are rounded, and the text costs more. */
"use strict";

lm.widgets.bits = function (place, { model, tokenizer }) {
  const CHOICES = [16, 8, 4, 3, 2];
  const state = lm.stateOf(place, { text: place.dataset.prompt, bits: 16 });
  const text = lm.field("A text", state.text, (value) => change({ text: value }));
  const whole = { ...model.tensors };
  const costs = new Map(); // of this text, by bits
  const buttons = CHOICES.map((bits) =>
    lm.element("button", { type: "button", onclick: () => change({ bits }) }, `${bits} bits`));
  const said = lm.element("p", { role: "status" });
  const next = lm.element("ol", { class: "live-bars" });
  place.append(text, lm.element("div", { class: "live-buttons" }, ...buttons), said, next);

  function change(news) {
    if ("text" in news) costs.clear();
    Object.assign(state, news);
    lm.keepState(place, state);
    show();
  }

  function inBits(bits) {
    const tensors = { ...whole };
    for (const [name, tensor] of Object.entries(whole)) {
      if (bits < 16 && tensor.shape.length === 2) tensors[name] = lm.rounded(tensor, bits);
    }
    return tensors;
  }

  function show() {
    const ids = [0, ...tokenizer.encode(state.text)].slice(0, model.config.block_size);
    const cost = (bits) => {
      if (!costs.has(bits)) {
        model.tensors = inBits(bits);
        costs.set(bits, lm.mean(lm.surprises(model, ids)));
      }
      return costs.get(bits);
    };
    const [full, now] = [cost(16), cost(state.bits)];
    const megabytes = Object.values(whole).reduce(
      (sum, { shape, data }) => sum + (data.length * (shape.length === 2 ? state.bits : 16)) / 8e6, 0);
    model.tensors = inBits(state.bits);
    const probabilities = lm.softmax(model.forward(ids));
    model.tensors = whole;
    buttons.forEach((button, i) => button.setAttribute("aria-pressed", String(CHOICES[i] === state.bits)));
    said.textContent =
      `${megabytes.toFixed(1)} MB of weights; the text costs ${now.toFixed(3)} bits a token, ` +
      `${(now - full).toFixed(3)} more than with 16.`;
    const best = [...probabilities.keys()].sort((a, b) => probabilities[b] - probabilities[a]);
    next.replaceChildren(...best.slice(0, 5).map((id) => lm.bar(tokenizer, id, probabilities[id])));
  }

  show();
};
