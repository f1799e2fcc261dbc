/* Turn the clock: all positions move by n. What does attention notice? */
"use strict";

lm.widgets.clock = function (place, shipped) {
  const others = { "qwen2-docs": "rotated positions (Qwen2)", "gpt2-docs": "learnt positions (GPT-2)" };
  const state = lm.stateOf(place, { text: place.dataset.prompt, shift: 0 });
  const text = lm.field("A text", state.text, (value) => change({ text: value }));
  const slider = lm.slider("all positions move by", {
    min: 0, max: 128, step: 1, value: state.shift, change: (value) => change({ shift: value }),
  });
  const rows = lm.element("div", { role: "status" });
  place.append(text, lm.element("div", { class: "live-sliders" }, slider), rows);

  function change(news) {
    Object.assign(state, news);
    lm.keepState(place, state);
    show();
  }

  /* The largest change of any attention weight, in percent, and of the likeliest next token. */
  function compare({ model, tokenizer }) {
    const ids = [0, ...tokenizer.encode(state.text)].slice(0, model.config.block_size - 128);
    const [still, moved] = [0, state.shift].map((shift) => {
      const weights = [];
      const watch = (stage, layer, heads) => stage === "attention" && weights.push(...heads);
      return { logits: model.forward(ids, { shift, watch }), weights };
    });
    let largest = 0;
    still.weights.forEach((head, i) =>
      head.forEach((weight, j) => (largest = Math.max(largest, Math.abs(weight - moved.weights[i][j])))),
    );
    const says = (logits) => lm.shown(tokenizer, lm.argmax(logits));
    return { largest, before: says(still.logits), after: says(moved.logits) };
  }

  function show() {
    rows.replaceChildren(
      ...Object.entries(others).map(([name, label]) => {
        const { largest, before, after } = compare(lm.shipped(name));
        return lm.element("p", {},
          lm.element("strong", {}, `${label}: `),
          `the attention weight that changes most changes by ${(100 * largest).toFixed(4)} percentage ` +
          `points; the next token is “${after}”` + (after === before ? ", as before." : `, and was “${before}”.`));
      }),
    );
  }

  show();
};
lm.widgets.clock.models = ["gpt2-docs", "qwen2-docs"];
