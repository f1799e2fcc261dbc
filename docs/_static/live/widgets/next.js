/* What does it say next? The reader types, sees the tokens, and the likeliest ones that follow. */
"use strict";

lm.widgets.next = function (place, { model, tokenizer }) {
  const controls = new lm.Controls(place, tokenizer, {
    text: place.dataset.prompt, temperature: [1, 0, 2, 0.05], top_k: [0, 0, 50, 1],
    top_p: [1, 0.05, 1, 0.05], seed: [0, 0, 2 ** 32, 1],
  }, show);
  const MANY = 60;
  const session = new lm.Session(model);
  let random = lm.randomFrom(controls.seed);
  let shown = [];
  let writing = false;
  let lastBars = 0; // when the bars were drawn

  const field = controls.field(lm.t("The beginning of a text"), {}, 0);
  controls.area.addEventListener("input", () => (random = lm.randomFrom(controls.seed)));
  const tokens = lm.tokenRow(tokenizer, []);
  let best = []; // the likeliest tokens
  const rows = Array.from({ length: 10 }, (_, i) => lm.bar("", 0, "", () => say(best[i])));
  const many = lm.workButton(lm.t("Write {count} tokens", { count: MANY }), write);
  place.append(field, tokens,
    lm.element("div", { class: "live-buttons" }, many, lm.button(lm.t("Add one token"), () => say(drawn()))),
    lm.element("p", {}, lm.t("The most likely next tokens; choose one to add it:")),
    lm.bars(...rows),
    lm.element("div", { class: "live-sliders" },
      controls.slider(lm.t("temperature (more: bolder)"), "temperature"),
      controls.slider(lm.t("top-k (0: all)"), "top_k"), controls.slider(lm.t("top-p (1: all)"), "top_p")),
    place.querySelector(".live-status"));

  const ids = () => controls.lastIds(model.config.block_size);

  function show() {
    const now = ids();
    // bars that change thirty times a second cannot be read, and take longer to draw than the text
    if (!writing || performance.now() > lastBars + 120) showBars(now);
    // what is drawn already stays
    let same = 0;
    while (same < now.length && shown[same] === now[same]) same++;
    while (tokens.children.length > same) tokens.lastChild.remove();
    tokens.append(...now.slice(same).map((id, i) => lm.token(tokenizer, id, same + i)));
    shown = now;
  }

  function showBars(now) {
    lastBars = performance.now();
    const logits = lm.sampled(session.logits(now), controls);
    const probabilities =
      controls.temperature === 0 ? lm.oneHot(logits.length, lm.argmax(logits)) : lm.softmax(logits);
    best = lm.best(probabilities, rows.length);
    rows.forEach((row, i) => {
      row.hidden = i >= best.length;
      if (!row.hidden) row.set(lm.shown(tokenizer, best[i]), probabilities[best[i]]);
    });
  }

  function drawn() {
    const logits = lm.sampled(session.logits(ids()), controls);
    return controls.temperature === 0 ? lm.argmax(logits) : lm.draw(logits, random());
  }

  /* Add a token to the text, and say so; false where it ends the text. */
  function say(id, aloud = true) {
    if (tokenizer.special.has(id)) {
      controls.say(lm.t("Here the model ends its text."));
      return false;
    }
    if (aloud) controls.say(lm.t("“{token}” was added.", { token: lm.shown(tokenizer, id) }));
    controls.write(id);
    return true;
  }

  async function write(on) {
    controls.say("");
    writing = true;
    let n = 0;
    while (on() && n < MANY && say(drawn(), false)) {
      n++;
      await lm.pause();
    }
    writing = false;
    controls.change({}); // the bars of the last token
    if (n === MANY || !on()) controls.say(lm.t("{count} tokens were added.", { count: n }));
  }

  show();
};
