/* Turn the clock: all positions move by n. What does attention notice? */
"use strict";

lm.widgets.clock = function (place) {
  const LABELS = { "qwen2-docs": "Qwen2, rotated", "gpt2-docs": "GPT-2, learned" };
  const FARTHEST = 128;
  const unmoved = {}; // what each model did with the text where it stands
  const controls = new lm.Controls(place, lm.shipped("qwen2-docs").tokenizer, { text: place.dataset.prompt, shift: [16, 0, FARTHEST, 1] }, show);
  const rows = lm.element("div");
  place.append(controls.field("A text"),
    lm.element("div", { class: "live-sliders" }, controls.slider("tokens before the text", "shift")), rows,
    place.querySelector(".live-status"));

  function run(model, ids, shift) {
    const weights = [];
    const watch = (stage, layer, heads) => stage === "attention" && weights.push(...heads);
    return { logits: model.forward(ids, { shift, watch }), weights, key: String(ids) };
  }

  /* The largest change of any attention weight, and the next token before and after. */
  function compare(name, { model, tokenizer }) {
    const ids = controls.ids(64);
    if (unmoved[name]?.key !== String(ids)) unmoved[name] = run(model, ids, 0);
    const [still, moved] = [unmoved[name], run(model, ids, controls.shift)];
    let largest = 0;
    still.weights.forEach((head, i) =>
      head.forEach((weight, j) => (largest = Math.max(largest, Math.abs(weight - moved.weights[i][j])))),
    );
    const says = (logits) => lm.shown(tokenizer, lm.argmax(logits));
    return { largest, before: says(still.logits), after: says(moved.logits) };
  }

  function show() {
    const found = Object.entries(LABELS).map(([name, label]) => ({ label, ...compare(name, lm.shipped(name)) }));
    rows.replaceChildren(
      lm.element("p", {}, "The largest change of an attention weight, in percentage points:"),
      lm.bars(...found.map(({ label, largest }) => lm.bar(label, largest, `${(100 * largest).toFixed(4)}`))));
    const said = found
      .map(({ label, before, after }) =>
        `${label}: the next token is “${after}”${after === before ? ", as before" : `, and was “${before}”`}.`)
      .join(" ");
    controls.say(said);
  }

  show();
};
lm.widgets.clock.models = ["gpt2-docs", "qwen2-docs"];
