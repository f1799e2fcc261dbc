/* Two models at once: GPT-2 proposes tokens, Qwen2 checks them in one pass. */
"use strict";

lm.widgets.draft = function (place) {
  const [small, large] = lm.widgets.draft.models.map(lm.shipped);
  const tokenizer = large.tokenizer; // both have the same
  const state = lm.stateOf(place, { text: place.dataset.prompt, draft: 4 });
  const text = lm.field("The beginning of a text", state.text, (value) => change({ text: value }));
  const slider = lm.slider("tokens in a draft", {
    min: 1, max: 8, step: 1, value: state.draft, change: (value) => change({ draft: value }),
  });
  const go = lm.element("button", { type: "button", onclick: run }, "Write 40 tokens");
  const rounds = lm.element("ol", { class: "live-rounds" });
  const said = lm.element("p", { role: "status" });
  place.append(text, lm.element("div", { class: "live-sliders" }, slider), go, rounds, said);

  function change(news) {
    Object.assign(state, news);
    lm.keepState(place, state);
  }

  async function run() {
    go.disabled = true;
    rounds.replaceChildren();
    const [drafting, checking] = [new lm.Session(small.model), new lm.Session(large.model)];
    const ids = [0, ...tokenizer.encode(state.text)].slice(0, 200);
    const end = ids.length + 40;
    let [passes, kept, drafted] = [0, 0, 0];
    const V = large.model.config.vocab_size;
    while (ids.length < end) {
      const draft = [];
      for (let n = 0; n < state.draft; n++) draft.push(lm.argmax(drafting.logits([...ids, ...draft])));
      // one pass over all of them gives the checking model's own choice behind each
      checking.cache.crop(ids.length - 1);
      checking.ids = checking.ids.slice(0, checking.cache.length);
      const from = checking.cache.length;
      const logits = large.model.forward([...ids, ...draft].slice(from), { cache: checking.cache, all: true });
      checking.ids = [...ids, ...draft];
      passes++;
      let agreed = 0;
      const choice = (n) => {
        const row = ids.length - 1 - from + n;
        return lm.argmax(logits.subarray(row * V, (row + 1) * V));
      };
      while (agreed < draft.length && choice(agreed) === draft[agreed]) agreed++;
      const own = choice(agreed);
      ids.push(...draft.slice(0, agreed), own);
      kept += agreed;
      drafted += draft.length;
      rounds.append(lm.element("li", {},
        ...draft.map((id, n) => lm.element(n < agreed ? "ins" : "del", {}, lm.shown(tokenizer, id))),
        lm.element("strong", {}, lm.shown(tokenizer, own))));
      said.textContent =
        `${kept} of ${drafted} drafted tokens were kept. Qwen2 ran ${passes} times for ${kept + passes} ` +
        `tokens; the text is what it would have written alone.`;
      await new Promise((resolve) => setTimeout(resolve));
    }
    go.disabled = false;
  }
};
lm.widgets.draft.models = ["gpt2-docs", "qwen2-docs"];
