/* Break it: one part of the model is switched off. Which one? */
"use strict";

lm.widgets.break = function (place, { model, tokenizer }) {
  const PARTS = {
    noPositions: "it does not know where tokens stand",
    noScale: "scores are not divided by the root of D",
    noMask: "tokens see those that come after them",
  };
  const state = lm.stateOf(place, { text: place.dataset.prompt, hidden: 1 + Math.floor(Math.random() * 1e6) });
  const text = lm.field("A text", state.text, (value) => change({ text: value }));
  const tokens = lm.element("ol", { class: "live-tokens" });
  const said = lm.element("p", { role: "status" });
  const guesses = Object.entries(PARTS).map(([name, label]) =>
    lm.element("button", { type: "button", onclick: () => guess(name) }, label));
  const again = lm.element("button", {
    type: "button", onclick: () => change({ hidden: 1 + Math.floor(Math.random() * 1e6) }),
  }, "Hide another defect");
  place.append(text, tokens, said, lm.element("p", {}, "What is broken?"),
    lm.element("div", { class: "live-buttons" }, ...guesses), again);

  const names = Object.keys(PARTS);
  const hidden = () => names[Math.floor(lm.randomFrom(state.hidden)() * names.length)];

  function change(news) {
    Object.assign(state, news);
    lm.keepState(place, state);
    show();
  }

  function withBroken(broken, run) {
    model.broken = broken;
    try {
      return run();
    } finally {
      model.broken = {};
    }
  }

  function show() {
    const ids = [0, ...tokenizer.encode(state.text)].slice(0, model.config.block_size);
    const whole = lm.surprises(model, ids);
    const broken = withBroken({ [hidden()]: true }, () => lm.surprises(model, ids));
    tokens.replaceChildren(...ids.slice(1).map((id, t) =>
      lm.element("li", { class: "live-token", title: `${broken[t].toFixed(1)} bits, whole ${whole[t].toFixed(1)}`,
        style: `--p: ${Math.min(1, Math.abs(broken[t] - whole[t]) / 6)}` },
      lm.shown(tokenizer, id), lm.element("small", {}, `${(broken[t] - whole[t]).toFixed(1)}`))));
    said.textContent =
      `The broken model needs ${lm.mean(broken).toFixed(2)} bits a token, the whole one ` +
      `${lm.mean(whole).toFixed(2)}. Below each token: how many more.`;
  }

  function guess(name) {
    said.textContent = name === hidden()
      ? `Right: ${PARTS[name]}.`
      : "No. Try a text with a repeated word, a very long one, or one of two tokens.";
  }

  show();
};
