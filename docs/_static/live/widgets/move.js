/* Move something in the model's head: one state of a run is replaced by that of another run, as in
 * inside/patching.py. The text stays as it is.
 *
 * "The key is in the [hall|kitchen]. Where is the key? The key is in the _." has the first word; the
 * other run reads the second. Every _ is a token that the model fills in. */
"use strict";

/* A run over the tokens `ids` (T): what enters each block, and the last norm, (T, C) each; and the
 * logits (V) of the last token. */
lm.streams = function (model, ids) {
  const states = [];
  const logits = model.forward(ids, { watch: (stage, block, x) => stage === "x" && states.push(x.slice()) });
  return { states, logits };
};

/* Watch a run with this, and a row of what enters block `layer`, that of `token`, is the one in `state` (T, C). */
lm.put = (state, layer, token, C) => (stage, block, x) => {
  if (stage === "x" && block === layer - 1) x.set(state.subarray(token * C, (token + 1) * C), token * C);
};

lm.widgets.move = function (place, { model, tokenizer }) {
  const { n_layer, n_embd, block_size } = model.config;
  const MOST = 128; // tokens of a story
  const FACT = /\[([^|\]]*)\|([^\]]*)\]/;
  const STORIES = [
    ["The key lies there", "Mia is in the hall. Tom is in the garden. The key is in the [hall|kitchen]. Where is the key? The key is in the _. Where is Mia? Mia is in the _."],
    ["Mia carries it", "Tom is in the hall. Mia has the key. Mia goes to the [kitchen|garden]. Where is the key? Mia has the key, in the _. Where is Mia? Mia is in the _. Mia puts down the key. Where is the key? The key is in the _."],
    ["Who has it?", "Mia is in the hall. Tom is in the garden. [Mia|Tom] has the key. Who has the key? _ has the key. Where is the key? _"],
  ];
  const KINDS = [["hall", "garden", "kitchen", "cellar"], ["Mia", "Tom", "Anna", "Sam"]];
  const controls = new lm.Controls(place, tokenizer, {
    text: place.dataset.prompt, block: [2, 0, n_layer - 1, 1], token: [-1, -1, MOST - 1, 1],
  }, show);
  let story; // what both runs make of a text
  let now; // the run with one state of the other one
  const shares = new Map(); // by block and token: what the other run's answer has, of those tried

  const group = (label, ...inside) => lm.element("div", { class: "live-buttons", role: "group", "aria-label": label }, ...inside);
  const stories = STORIES.map(([name, text]) => lm.button(name, () => controls.change({ text, token: -1 })));
  const tokens = lm.withArrows(lm.element("ol", { class: "live-tokens" }), 1, 1);
  const words = lm.element("span", { class: "live-buttons" });
  const blocks = Array.from({ length: n_layer }, (_, block) => lm.button(String(block), () => controls.change({ block })));
  const lead = lm.element("span");
  const answers = lm.element("div", { class: "live-sides" });
  const field = controls.field("A story", { token: -1 });
  field.append(lm.element("p", { class: "live-note" },
    "Write your own: at [hall|kitchen] the model reads the first word and the other run the second; _ is a word for the model to fill in."));
  place.append(group("A story", ...stories), tokens, group("The word of the other run", lead, words),
    group("Before a block", "before block", ...blocks, lm.workButton("Try every token", tryEvery)),
    place.querySelector(".live-status"), answers, field);

  /* A text as one of the runs has it, from blank to blank. */
  const parts = (word) => {
    const found = controls.text.replace(FACT, word).split("_").map((part) => part.trimEnd());
    return found.length > 1 ? found : [...found, ""];
  };
  const encode = (text) => [0, ...tokenizer.encode(text)].slice(0, MOST);

  /* The probabilities at the first blank, and the token at every blank. */
  function fill(watch) {
    const cache = model.cache();
    let logits = model.forward(story.ids, { cache, watch });
    const first = lm.softmax(logits);
    const filled = [lm.argmax(logits)];
    for (const part of story.parts.slice(1, -1)) {
      const more = [filled.at(-1), ...tokenizer.encode(part)];
      if (cache.length + more.length > block_size) break;
      logits = model.forward(more, { cache });
      filled.push(lm.argmax(logits));
    }
    return { first, filled };
  }

  function read() {
    const ids = encode(parts("$1")[0]);
    const other = encode(parts("$2")[0]);
    const at = encode(controls.text.split(FACT)[0] + (FACT.exec(controls.text)?.[1] ?? "")).length - 1;
    story = { text: controls.text, parts: parts("$1"), ids, at: Math.min(at, ids.length - 1) };
    story.same = ids.length === other.length;
    const { states, logits } = lm.streams(model, story.same ? other : ids);
    Object.assign(story, { states, answer: lm.argmax(logits), whole: fill() });
    now = undefined;
    shares.clear();
  }

  const key = (token) => `${controls.block}.${token}`;
  const put = (token) => lm.put(story.states[controls.block], controls.block, token, n_embd);

  async function tryEvery(on) {
    for (let token = 0; on() && token < story.ids.length; token++) {
      if (!shares.has(key(token))) shares.set(key(token), lm.softmax(model.forward(story.ids, { watch: put(token) }))[story.answer]);
      controls.change({});
      await lm.pause();
    }
  }

  function show() {
    if (story?.text !== controls.text) read();
    const { ids, answer, whole } = story;
    const token = controls.token < 0 || controls.token >= ids.length ? story.at : controls.token;
    if (now?.key !== key(token)) now = { key: key(token), ...fill(put(token)) };
    shares.set(key(token), now.first[answer]);
    drawChoices();
    lm.replace(tokens, ...ids.map((id, t) => tokenButton(id, t, t === token)));
    const likely = [whole, now].flatMap(({ first }) => lm.best(first, 3).filter((id) => first[id] > 0.001));
    const shown = [...new Set([...likely.slice(0, 3), answer, ...likely])].slice(0, 4);
    answers.replaceChildren(side("As the model reads it", whole, shown), side("With one state replaced", now, shown));
    const [before, after] = [whole.first[answer], now.first[answer]];
    const change = Math.abs(after - before) < 0.005 ? `stays at ${lm.percent(before)}` : `goes from ${lm.percent(before)} to ${lm.percent(after)}`;
    controls.say(`Before block ${controls.block}, the state at “${lm.shown(tokenizer, ids[token])}” comes from the other run: “${lm.shown(tokenizer, answer)}” ${change}.`);
  }

  function drawChoices() {
    const [, first, second] = FACT.exec(controls.text) ?? [];
    const press = (button, on) => button.setAttribute("aria-pressed", String(on));
    const plain = (text) => text.replace(FACT, "$1");
    stories.forEach((button, i) => press(button, plain(STORIES[i][1]) === plain(controls.text)));
    blocks.forEach((button, i) => press(button, i === controls.block));
    const kind = KINDS.find((words) => words.includes(first)) ?? [];
    lm.replace(words, ...kind.map((word) => {
      const button = lm.button(word, () => controls.change({ text: controls.text.replace(FACT, `[${first}|${word}]`) }));
      press(button, word === second);
      return button;
    }));
    lead.textContent = first === undefined ? "No word is in brackets: the other run reads the same."
      : story.same ? `The chosen token gets its state from a run that has, in the place of “${first}”,`
        : `“${first}” and “${second}” have different numbers of tokens: the other run reads the same.`;
    controls.note.textContent = story.ids.length === MOST ? lm.t("Only the first {count} tokens are read.", { count: MOST }) : "";
  }

  function tokenButton(id, t, chosen) {
    const share = shares.get(key(t));
    return lm.element("li", {}, lm.element("button", {
      type: "button", class: "live-looked", style: `--p: ${0.7 * (share ?? 0)}`, "aria-pressed": String(chosen), tabindex: chosen ? 0 : -1,
      onclick: () => controls.change({ token: t }),
    }, lm.shown(tokenizer, id), lm.element("small", {}, share === undefined ? "" : lm.percent(share, 0))));
  }

  /* What a run says: the likeliest tokens at the first blank, and the end of the text with all blanks filled. */
  function side(label, { first, filled }, shown) {
    const [begin, ...rest] = story.parts;
    const question = begin.lastIndexOf(". ", begin.lastIndexOf("?")) + 1;
    const said = lm.element("p", { class: "said" }, begin.slice(question).trimStart());
    filled.forEach((id, i) => said.append(lm.element("b", {}, tokenizer.decode([id])), rest[i]));
    return lm.element("div", {}, lm.element("p", {}, lm.element("strong", {}, label)),
      lm.bars(...shown.map((id) => lm.bar(lm.shown(tokenizer, id), first[id], lm.percent(first[id])))), said);
  }

  show();
};
