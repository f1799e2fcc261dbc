/* What does it say next? The reader types, sees the tokens, and the likeliest ones that follow. */
"use strict";

lm.widgets.next = function (place, { model, tokenizer }) {
  const SHOWN = 10;
  const state = lm.stateOf(place, {
    text: place.dataset.prompt, temperature: 1, top_k: 0, top_p: 1, seed: 0,
  });
  const session = new lm.Session(model);
  const room = model.config.block_size;
  let random = lm.randomFrom(state.seed);
  let running = false;

  const status = place.querySelector(".live-status");
  const text = lm.field("The beginning of a text", state.text, (value) => {
    random = lm.randomFrom(state.seed);
    change({ text: value });
  });
  const tokens = lm.element("div");
  const bars = lm.element("ol", { class: "live-bars" });
  const slider = (label, name, options) =>
    lm.slider(label, { ...options, value: state[name], change: (value) => change({ [name]: value }) });
  const sliders = [
    slider("temperature", "temperature", { min: 0, max: 2, step: 0.05 }),
    slider("top-k", "top_k", { min: 0, max: 50, step: 1 }),
    slider("top-p", "top_p", { min: 0.05, max: 1, step: 0.05 }),
  ];
  const one = lm.element("button", { type: "button", onclick: () => draw() }, "Draw one token");
  const many = lm.element("button", { type: "button", onclick: write }, "Write");
  place.append(
    text, tokens, lm.element("div", { class: "live-sliders" }, ...sliders), bars,
    lm.element("div", { class: "live-buttons" }, one, many),
  );

  /* The ids of the text, from the start of a document; the last ones, if there are too many. */
  const ids = () => [0, ...tokenizer.encode(state.text)].slice(-room);

  function change(news) {
    Object.assign(state, news);
    lm.keepState(place, state);
    show();
  }

  function show() {
    const now = ids();
    const logits = lm.sampled(session.logits(now), state);
    const probabilities = state.temperature === 0 ? onlyLikeliest(logits) : lm.softmax(logits);
    const best = [...probabilities.keys()]
      .sort((a, b) => probabilities[b] - probabilities[a])
      .slice(0, SHOWN)
      .filter((id) => probabilities[id] > 0);
    tokens.replaceChildren(lm.tokenRow(tokenizer, now));
    bars.replaceChildren(...best.map((id) => lm.bar(tokenizer, id, probabilities[id], () => append(id))));
    return logits;
  }

  const onlyLikeliest = (logits) => logits.map((_, id) => (id === lm.argmax(logits) ? 1 : 0));

  function append(id) {
    text.value = state.text + (id === 0 ? "" : tokenizer.decode([id]));
    change({ text: text.value });
    status.textContent = id === 0 ? "The model ends the text here." : "";
    return id !== 0;
  }

  function draw() {
    const logits = lm.sampled(session.logits(ids()), state);
    const id = state.temperature === 0 ? lm.argmax(logits) : lm.draw(logits, random());
    return append(id);
  }

  /* Token after token, each shown before the next; the same button stops it. */
  async function write() {
    running = !running;
    many.textContent = running ? "Stop" : "Write";
    for (let n = 0; running && n < 100 && draw(); n++) {
      await new Promise((resolve) => setTimeout(resolve));
    }
    running = false;
    many.textContent = "Write";
  }

  show();
};
