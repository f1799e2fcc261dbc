/* Break it: one part of the model is switched off. Which one? */
"use strict";

lm.widgets.break = function (place, { model, tokenizer }) {
  const PARTS = {
    noPositions: "It does not know where tokens stand",
    noScale: "Scores are not divided by √D",
    noMask: "Tokens see those that come after them",
  };
  const any = () => 1 + Math.floor(Math.random() * 1e6);
  const controls = new lm.Controls(place, { text: place.dataset.prompt, hidden: [any(), 1, 1e6, 1] }, show);
  const said = place.querySelector(".live-status");
  const costs = lm.element("div");
  const next = lm.bars();
  const guesses = Object.entries(PARTS).map(([name, label]) => lm.button(label, () => guess(name)));
  place.append(controls.field("A text"),
    lm.element("p", {}, "What each token costs this model, in bits, and in brackets how much more than the whole one:"), costs,
    lm.element("p", {}, "What it would say next:"), next,
    lm.element("p", {}, "What is broken?"),
    lm.element("div", { class: "live-buttons" }, ...guesses),
    said,
    lm.element("div", { class: "live-buttons" }, lm.button("Hide another defect", () => {
      said.textContent = "";
      controls.change({ hidden: any() });
    })));

  /* The link holds a number that tells nobody which part it is. */
  function hidden() {
    const names = Object.keys(PARTS);
    return names[Math.floor(lm.randomFrom(controls.hidden)() * names.length)];
  }

  function read(ids, broken) {
    model.broken = broken;
    const logits = model.forward(ids, { all: true });
    model.broken = {};
    return { costs: lm.costs(logits, ids), next: lm.softmax(logits.subarray(-model.config.vocab_size)) };
  }

  function show() {
    const ids = lm.idsOf(tokenizer, controls.text, 64);
    const [whole, broken] = [read(ids, {}), read(ids, { [hidden()]: true })];
    const signed = (x) => (x < 0 ? "−" : "+") + Math.abs(x).toFixed(1);
    lm.replace(costs, lm.tokenRow(tokenizer, ids.slice(1), (_, t) =>
      `${broken.costs[t].toFixed(1)} (${signed(broken.costs[t] - whole.costs[t])})`));
    lm.replace(next, ...lm.likeliest(tokenizer, broken.next, 5));
  }

  function guess(name) {
    said.textContent = name === hidden()
      ? `Right: ${PARTS[name][0].toLowerCase()}${PARTS[name].slice(1)}.`
      : "No. Try a text with a word that comes twice, a very long one, or one of two tokens.";
  }

  show();
};
