/* One token, all the way through: from the text to the next token, stage by stage. */
"use strict";

lm.widgets.tour = function (place, { model, tokenizer }) {
  const { n_layer, n_embd, vocab_size, block_size } = model.config;
  const state = lm.stateOf(place, { text: place.dataset.prompt, stage: 0 });
  const text = lm.field("The beginning of a text", state.text, (value) => change({ text: value, stage: 0 }));
  const title = lm.element("h4", { role: "status" });
  const body = lm.element("div");
  const back = lm.element("button", { type: "button", onclick: () => change({ stage: state.stage - 1 }) }, "Back");
  const on = lm.element("button", { type: "button", onclick: () => change({ stage: state.stage + 1 }) }, "On");
  place.append(text, title, body, lm.element("div", { class: "live-buttons" }, back, on));

  function change(news) {
    Object.assign(state, news);
    lm.keepState(place, state);
    show();
  }

  /* What the model computes for this text: x before and behind every block, and all weights. */
  function run() {
    const ids = [0, ...tokenizer.encode(state.text)].slice(0, block_size);
    const seen = { ids, x: [], attention: [] };
    seen.logits = model.forward(ids, {
      watch: (stage, layer, value) => {
        if (stage === "x") seen.x[layer + 1] = value.slice(-n_embd);
        if (stage === "tokens") seen.embedded = value.slice(-n_embd);
        if (stage === "attention") seen.attention[layer] = value.map((head) => head.slice(-ids.length));
      },
    });
    return seen;
  }

  const numbers = (x) => [...x.slice(0, 8)].map((n) => n.toFixed(2)).join(", ") + ", …";
  const p = (...children) => lm.element("p", {}, ...children);

  /* The likeliest tokens, if x were the end of the model already: a logit lens. */
  function likeliest(logits, count) {
    const probabilities = lm.softmax(logits);
    const best = [...probabilities.keys()].sort((a, b) => probabilities[b] - probabilities[a]);
    return lm.element("ol", { class: "live-bars" },
      ...best.slice(0, count).map((id) => lm.bar(tokenizer, id, probabilities[id])));
  }

  function stages(seen) {
    const { ids, x } = seen;
    const last = ids.at(-1);
    const blocks = Array.from({ length: n_layer }, (_, layer) => [
      `Block ${layer + 1} of ${n_layer}`,
      () => {
        const mean = new Float64Array(ids.length);
        for (const head of seen.attention[layer]) head.forEach((w, s) => (mean[s] += w / seen.attention[layer].length));
        const looks = ids.map((id, s) => lm.element("li", { class: "live-looked", style: `--p: ${mean[s]}`,
          title: `${(100 * mean[s]).toFixed(1)} %` }, lm.shown(tokenizer, id)));
        return [
          p("Attention takes from these tokens (the mean of its heads), the MLP works on what it has:"),
          lm.element("ol", { class: "live-tokens" }, ...looks),
          p(`The vector is now [${numbers(x[layer + 1])}].`),
          p("If the model ended here, it would say:"),
          likeliest(model.logits(x[layer + 1]), 3),
        ];
      },
    ]);
    return [
      ["Text becomes tokens", () => [
        p(`${ids.length} tokens, each one of ${vocab_size}. The first stands for the start of a document. ` +
          `From here on we follow the last.`), lm.tokenRow(tokenizer, ids)]],
      ["A token becomes a vector", () => [
        p(`Token ${last}, “${lm.shown(tokenizer, last)}”, is row ${last} of a table of ${vocab_size} × ${n_embd} numbers:`),
        p(`[${numbers(seen.embedded)}]`)]],
      ...blocks,
      ["Scores become probabilities", () => [
        p(`The last vector is compared with all ${vocab_size} rows of the table. Softmax makes probabilities of the scores:`),
        likeliest(seen.logits, 8)]],
      ["The next token", () => {
        const next = lm.argmax(seen.logits);
        return [
          p(`The likeliest is “${lm.shown(tokenizer, next)}”. It is written behind the text, and everything begins again.`),
          lm.element("button", { type: "button", onclick: () => {
            text.value = state.text + (next ? tokenizer.decode([next]) : "");
            change({ text: text.value, stage: 0 });
          } }, "Write it, and begin again"),
        ];
      }],
    ];
  }

  function show() {
    const all = stages(run());
    state.stage = Math.min(Math.max(0, state.stage), all.length - 1);
    const [name, content] = all[state.stage];
    title.textContent = `${state.stage + 1} of ${all.length}: ${name}`;
    body.replaceChildren(...content());
    back.disabled = state.stage === 0;
    on.disabled = state.stage === all.length - 1;
  }

  show();
};
