/* Beam search as a tree: which beginnings were kept at each step, and which one won. */
"use strict";

lm.widgets.beams = function (place, { model, tokenizer }) {
  const STEPS = 6;
  const controls = new lm.Controls(place, tokenizer, { text: place.dataset.prompt, beams: [3, 1, 5, 1] }, show);
  const tree = lm.element("div");
  place.append(controls.field("The beginning of a text"),
    lm.element("div", { class: "live-sliders" }, controls.slider("beginnings kept", "beams")), place.querySelector(".live-status"), tree);

  /* A node of the tree is a token after its parent: `bits` is the surprise of all so far. */
  function search(ids, count) {
    const session = new lm.Session(model);
    const root = { bits: 0, ids: [], children: [] };
    let beams = [root];
    for (let step = 0; step < STEPS; step++) {
      const candidates = beams.flatMap((beam) => {
        const probabilities = lm.softmax(lm.withoutEnd(session.logits([...ids, ...beam.ids])));
        return lm.best(probabilities, count).map((id) => ({
          id, parent: beam, ids: [...beam.ids, id], children: [],
          bits: beam.bits - Math.log2(probabilities[id]),
        }));
      });
      beams = candidates.sort((a, b) => a.bits - b.bits).slice(0, count);
      for (const beam of beams) beam.parent.children.push(beam);
    }
    return { root, best: beams[0] };
  }

  function branch({ children }, best) {
    return lm.element("ul", { class: "live-tree" }, ...children.map((child) => {
      const won = child.ids.every((id, i) => id === best.ids[i]);
      return lm.element("li", {},
        lm.element(won ? "strong" : "span", {}, lm.shown(tokenizer, child.id)),
        lm.element("small", {}, ` ${child.bits.toFixed(1)} bits`),
        ...(child.children.length ? [branch(child, best)] : []));
    }));
  }

  function show() {
    const ids = controls.ids(128);
    const { root, best } = search(ids, controls.beams);
    const alone = search(ids, 1).best;
    tree.replaceChildren(branch(root, best));
    const text = (tokens) => tokens.map((id) => lm.shown(tokenizer, id)).join("");
    controls.say(
      `With ${controls.beams} kept: “${text(best.ids)}”, ${best.bits.toFixed(1)} bits. The most likely token at each ` +
      `step: “${text(alone.ids)}”, ${alone.bits.toFixed(1)} bits. Fewer bits are a more likely text.`);
  }

  show();
};
