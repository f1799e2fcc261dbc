/* Cache race: the same tokens, written with a cache and without. */
"use strict";

lm.widgets.race = function (place, { model, tokenizer }) {
  const state = lm.stateOf(place, { text: place.dataset.prompt, tokens: 40 });
  const text = lm.field("The beginning of a text", state.text, (value) => change({ text: value }));
  const count = lm.slider("tokens", {
    min: 10, max: 120, step: 10, value: state.tokens, change: (value) => change({ tokens: value }),
  });
  const go = lm.element("button", { type: "button", onclick: run }, "Race");
  const lanes = ["with a cache", "without"].map((name) => {
    const bar = lm.element("progress", { max: state.tokens, value: 0, "aria-label": name });
    const said = lm.element("p", {});
    return { name, bar, said, row: lm.element("div", {}, lm.element("strong", {}, name), bar, said) };
  });
  const result = lm.element("p", { role: "status" });
  place.append(text, lm.element("div", { class: "live-sliders" }, count), go,
    ...lanes.map((lane) => lane.row), result);

  function change(news) {
    Object.assign(state, news);
    lm.keepState(place, state);
  }

  /* Multiplications of one pass over T new tokens that see S in all: each weight once a token,
   * and in every head a query and a value for each token that is seen. */
  function multiplications(T, S) {
    const { n_layer, n_head, head_dim } = model.config;
    const weights = Object.values(model.tensors)
      .filter(({ shape }) => shape.length === 2 && shape[0] !== model.config.vocab_size)
      .reduce((sum, { shape }) => sum + shape[0] * shape[1], 0);
    const head = model.headWeight.data.length; // for the last token alone
    const seen = (T * (2 * S - T + 1)) / 2;
    return T * weights + head + n_layer * n_head * 2 * seen * head_dim;
  }

  async function run() {
    go.disabled = true;
    const start = [0, ...tokenizer.encode(state.text)].slice(0, model.config.block_size - state.tokens);
    const times = [];
    for (const [cached, lane] of [[true, lanes[0]], [false, lanes[1]]]) {
      lane.bar.max = state.tokens;
      const session = new lm.Session(model);
      const ids = start.slice();
      let [seconds, products] = [0, 0];
      for (let n = 0; n < state.tokens; n++) {
        const before = performance.now();
        products += multiplications(cached && n ? 1 : ids.length, ids.length);
        const logits = cached ? session.logits(ids) : model.forward(ids);
        ids.push(lm.argmax(logits));
        seconds += (performance.now() - before) / 1e3;
        lane.bar.value = n + 1;
        lane.said.textContent =
          `${(products / 1e6).toFixed(0)} million multiplications, ${seconds.toFixed(2)} s, ` +
          `${((n + 1) / seconds).toFixed(0)} tokens/s`;
        await new Promise((resolve) => setTimeout(resolve));
      }
      times.push({ seconds, products, ids: ids.join() });
    }
    const [a, b] = times;
    result.textContent =
      `Without the cache: ${(b.products / a.products).toFixed(1)} times the multiplications, ` +
      `${(b.seconds / a.seconds).toFixed(1)} times as long, ` +
      (a.ids === b.ids ? "the same tokens." : "other tokens!");
    go.disabled = false;
  }
};
