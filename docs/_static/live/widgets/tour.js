/* One token, all the way through: from the text to the next token, stage by stage. */
"use strict";

lm.widgets.tour = function (place, { model, tokenizer }) {
  const { n_layer, n_head, n_embd, vocab_size } = model.config;
  const controls = new lm.Controls(place, tokenizer, { text: place.dataset.prompt, stage: [0, 0, 2 * n_layer + 3, 1] }, show);
  const body = lm.element("div");
  const move = (by) => () => controls.change({ stage: Math.min(Math.max(0, controls.stage + by), STAGES.length - 1) });
  const [back, on] = [lm.button(lm.t("Back"), move(-1)), lm.button(lm.t("Next step"), move(1))];
  const end = lm.button(lm.t("To the end"), () => controls.change({ stage: STAGES.length - 1 }));
  place.append(controls.field(lm.t("The beginning of a text"), { stage: 0 }), lm.element("div", { class: "live-buttons" }, back, on, end),
    place.querySelector(".live-status"), body);
  let seen = {};

  /* What the model computes for this text: the vector of the last token at every stage, and where
   * each head looked from there. */
  function run() {
    const ids = controls.lastIds(64);
    if (String(seen.ids) === String(ids)) return;
    seen = { ids, attended: [], behind: [], heads: [] };
    seen.logits = model.forward(ids, {
      watch: (stage, layer, value) => {
        if (stage === "x" && layer < 0) seen.embedded = value.slice(-n_embd);
        if (stage === "attended") seen.attended[layer] = value.slice(-n_embd);
        if (stage === "x" && layer >= 0) seen.behind[layer] = value.slice(-n_embd);
        if (stage === "attention") seen.heads[layer] = value.map((weights) => weights.slice(-ids.length));
      },
    });
  }

  const p = (text) => lm.element("p", {}, text);
  const last = () => lm.shown(tokenizer, seen.ids.at(-1));

  /* The likeliest next tokens, if x were the end of the model. */
  const lens = (x, count) => lm.bars(...lm.likeliest(tokenizer, lm.softmax(model.logits(x)), count));

  function words() {
    return [
      p(lm.t("The model reads tokens. This text has {count}, each with a number below {vocabulary}; the first marks the start of a document. From here on we follow the last one, “{last}”.",
        { count: seen.ids.length, vocabulary: vocab_size, last: last() })),
      lm.tokenRow(tokenizer, seen.ids),
    ];
  }

  function vector() {
    const id = seen.ids.at(-1);
    return [
      p(lm.t("Number {id} chooses row {id} of a table: {width} numbers that were learned. From here on they represent the token.",
        { id, width: n_embd })),
      lm.strip(seen.embedded),
    ];
  }

  /* Both in the same colours. */
  function beforeAndAfter(before, after) {
    const most = Math.max(...before.map(Math.abs), ...after.map(Math.abs));
    return [p(lm.t("The vector before, and after:")), lm.strip(before, most), lm.strip(after, most)];
  }

  function attention(layer) {
    const { ids } = seen;
    const most = seen.heads[layer].map((weights) => lm.argmax(weights));
    const strongest = lm.argmax(seen.heads[layer].map((weights, h) => weights[most[h]]));
    return [
      p(lm.t("Attention looks back from “{last}” in {heads} ways at once, its heads. Each adds what it finds to the vector. The most decisive one looks here:",
        { last: last(), heads: n_head })),
      lm.element("ol", { class: "live-tokens" }, ...ids.map((id, t) => {
        const weight = seen.heads[layer][strongest][t];
        return lm.element("li", { class: "live-looked", style: `--p: ${weight}` },
          lm.shown(tokenizer, id), lm.element("small", {}, weight < 0.005 ? "" : lm.percent(weight, 0)));
      })),
      ...beforeAndAfter(layer ? seen.behind[layer - 1] : seen.embedded, seen.attended[layer]),
    ];
  }

  function mlp(layer) {
    return [
      p(lm.t("The MLP works on this one vector alone, and adds to it.")),
      ...beforeAndAfter(seen.attended[layer], seen.behind[layer]),
      p(layer < n_layer - 1 ? lm.t("If the model stopped here, it would say:") : lm.t("This was the last block. The model says:")),
      lens(seen.behind[layer], 3),
    ];
  }

  function scores() {
    return [
      p(lm.t("The last vector is brought to a standard length, and multiplied with each of the {vocabulary} rows of the table: number by number, and added up. Softmax turns these scores into probabilities:",
        { vocabulary: vocab_size })),
      lens(seen.behind.at(-1), 8),
    ];
  }

  function next() {
    const id = lm.argmax(seen.logits);
    const ends = tokenizer.special.has(id);
    const write = () => {
      controls.write(id, { stage: 0 });
      controls.area.focus();
    };
    return [
      p(lm.t("The likeliest is “{token}”. ", { token: lm.shown(tokenizer, id) }) +
        (ends ? lm.t("It ends the text.") : lm.t("Added to the text, it is the next one to follow."))),
      ...(ends ? [] : [lm.element("div", { class: "live-buttons" }, lm.button(lm.t("Write it, and begin again"), write))]),
    ];
  }

  const STAGES = [
    [lm.t("Text becomes tokens"), words],
    [lm.t("A token becomes a vector"), vector],
    ...Array.from({ length: n_layer }, (_, layer) => [
      [lm.t("Block {block}: attention", { block: layer }), () => attention(layer)],
      [lm.t("Block {block}: MLP", { block: layer }), () => mlp(layer)],
    ]).flat(),
    [lm.t("The vector becomes probabilities"), scores],
    [lm.t("The next token"), next],
  ];

  function show() {
    run();
    const [name, content] = STAGES[controls.stage];
    controls.say(lm.t("Step {step} of {steps}. {name}", { step: controls.stage + 1, steps: STAGES.length, name }));
    body.replaceChildren(...content());
    // not disabled, which would lose the keyboard's place
    back.setAttribute("aria-disabled", String(controls.stage === 0));
    for (const button of [on, end]) button.setAttribute("aria-disabled", String(controls.stage === STAGES.length - 1));
  }

  show();
};
