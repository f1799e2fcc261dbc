/* Two models at once: GPT-2 drafts tokens, Qwen2 checks them in one pass. */
"use strict";

lm.widgets.draft = function (place) {
  const [drafts, checks] = lm.widgets.draft.models.map(lm.shipped);
  const { tokenizer } = checks; // both have the same
  const NEW = 40;
  const controls = new lm.Controls(place, tokenizer, { text: place.dataset.prompt, draft: [4, 1, 8, 1] }, () => {});
  const go = lm.workButton(`Write at least ${NEW} tokens`, run);
  const rounds = lm.element("ol", { class: "live-rounds" });
  place.append(controls.field("The beginning of a text"),
    lm.element("div", { class: "live-sliders" }, controls.slider("tokens in a draft", "draft")),
    lm.element("div", { class: "live-buttons" }, go), place.querySelector(".live-status"),
    lm.element("p", {}, "A line is a run of Qwen2. Marked: kept. Crossed out: thrown away. Bold: Qwen2's own token."), rounds);

  async function run(on) {
    rounds.replaceChildren();
    const [drafting, checking] = [new lm.Session(drafts.model), new lm.Session(checks.model)];
    const ids = controls.ids(200);
    const end = ids.length + NEW;
    const choice = (logits) => lm.argmax(lm.withoutEnd(logits));
    let [passes, kept, drafted] = [0, 0, 0];
    while (on() && ids.length < end) {
      const draft = [];
      while (draft.length < controls.draft) draft.push(choice(drafting.logits([...ids, ...draft])));
      // one pass gives Qwen2's own choice after the text and after each token of the draft
      const choices = checking.allLogits([...ids, ...draft], draft.length + 1).map(choice);
      let agreed = 0;
      while (agreed < draft.length && choices[agreed] === draft[agreed]) agreed++;
      ids.push(...draft.slice(0, agreed), choices[agreed]);
      passes++;
      kept += agreed;
      drafted += draft.length;
      const mark = (id, n) => lm.element(n < agreed ? "ins" : "del", {}, lm.shown(tokenizer, id));
      rounds.append(lm.element("li", {}, ...draft.map(mark),
        lm.element("strong", {}, lm.shown(tokenizer, choices[agreed]))));
      await lm.pause();
    }
    if (!on()) return;
    controls.say(
      `${kept} of ${drafted} drafted tokens were kept. Qwen2 ran ${passes} times for ${kept + passes} tokens, ` +
      "and wrote what it would have written alone. Both models have the same size here; a draft pays when its model is much smaller.");
  }
};
lm.widgets.draft.models = ["gpt2-docs", "qwen2-docs"];
