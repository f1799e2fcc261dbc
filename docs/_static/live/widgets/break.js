/* Break it: one part of the model is switched off. Which one? */
"use strict";

lm.widgets.break = function (place, { model, tokenizer }) {
  const PARTS = {
    noPositions: ["It does not know where tokens stand", "attention gets no hint of how far apart two tokens are."],
    noScale: ["The scores of attention are not divided by √D", "they are several times too large, and a head looks at nearly one token alone."],
    noMask: ["Tokens see those that come after them", "a word added at the end changes what it says about the beginning."],
  };
  const any = () => 1 + Math.floor(Math.random() * 1e6);
  const controls = new lm.Controls(place, tokenizer, { text: place.dataset.prompt, hidden: [any(), 1, 1e6, 1] }, show);
  let tries = 0;
  const costs = lm.element("div");
  const next = lm.bars();
  const guesses = Object.entries(PARTS).map(([name, [label]]) => lm.button(label, () => guess(name)));
  place.append(controls.field("A text"),
    lm.element("p", {}, "How much each token surprises this model, in bits, and in brackets how much more or less than the healthy one:"), costs,
    lm.element("p", {}, "What it would say next:"), next,
    lm.element("p", {}, "What is broken?"),
    lm.element("div", { class: "live-buttons" }, ...guesses),
    place.querySelector(".live-status"),
    lm.element("div", { class: "live-buttons" }, lm.button("Hide another defect", () => {
      controls.say("");
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
    const ids = controls.ids(64);
    const [whole, broken] = [read(ids, {}), read(ids, { [hidden()]: true })];
    const signed = (x) => (x < 0 ? "−" : "+") + Math.abs(x).toFixed(1);
    lm.replace(costs, lm.tokenRow(tokenizer, ids.slice(1), (_, t) =>
      `${broken.costs[t].toFixed(1)} (${signed(broken.costs[t] - whole.costs[t])})`));
    lm.replace(next, ...lm.likeliest(tokenizer, broken.next, 5));
  }

  function guess(name) {
    const [label, symptom] = PARTS[name];
    tries++;
    controls.say(name === hidden()
      ? `Right. ${label}: ${symptom}`
      : `No, that is not it (guess ${tries}). Add a word at the end: do the numbers before it change? ` +
        "If not: is it a little more surprised than the healthy model, or much more?");
  }

  show();
};
