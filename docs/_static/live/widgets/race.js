/* Cache race: the same tokens, written with a cache and without. */
"use strict";

lm.widgets.race = function (place, { model, tokenizer }) {
  const controls = new lm.Controls(place, tokenizer, { text: place.dataset.prompt, tokens: [40, 10, 120, 10] }, () => {});
  const go = lm.workButton(lm.t("Race"), run);
  const lanes = [lm.t("with a cache"), lm.t("without")].map((name) => {
    const bar = lm.element("progress", { max: 1, value: 0, "aria-label": name });
    return { bar, figures: lm.element("span") };
  });
  place.append(controls.field(lm.t("The beginning of a text")),
    lm.element("div", { class: "live-sliders" }, controls.slider(lm.t("tokens"), "tokens")),
    lm.element("div", { class: "live-buttons" }, go),
    ...lanes.map(({ bar, figures }) => lm.element("p", { class: "live-lane" },
      lm.element("strong", {}, bar.getAttribute("aria-label")), bar, figures)),
    place.querySelector(".live-status"));

  /* Multiplications of one pass over T new tokens that see S in all: each weight once a token, and
   * in every head a query and a value for each token that is seen. The head of the model, a row for
   * each token of the vocabulary, is for the last one alone. */
  const tables = [model.headWeight, model.tensors["wpe.weight"]];
  const inBlocks = Object.values(model.tensors)
    .filter((tensor) => tensor.shape.length === 2 && !tables.includes(tensor))
    .reduce((sum, { data }) => sum + data.length, 0);

  function multiplications(T, S) {
    const { n_layer, n_head, head_dim } = model.config;
    const seen = (T * (2 * S - T + 1)) / 2;
    return T * inBlocks + model.headWeight.data.length + n_layer * n_head * 2 * seen * head_dim;
  }

  /* Each lane has a clock of its own; the one that is behind goes on. */
  async function run(on) {
    controls.say("");
    const count = controls.tokens;
    const start = controls.ids(model.config.block_size - count);
    for (const lane of lanes) Object.assign(lane, { ids: start.slice(), seconds: 0, products: 0 });
    const [cached, whole] = lanes;
    const session = new lm.Session(model);
    const left = (lane) => lane.ids.length < start.length + count;
    while (on() && (left(cached) || left(whole))) {
      const lane = left(cached) && (!left(whole) || cached.seconds <= whole.seconds) ? cached : whole;
      const read = lane === cached && lane.products ? 1 : lane.ids.length;
      const before = performance.now();
      const logits = lane === cached ? session.logits(lane.ids) : model.forward(lane.ids);
      lane.ids.push(lm.argmax(lm.withoutEnd(logits)));
      lane.seconds += (performance.now() - before) / 1e3;
      lane.products += multiplications(read, lane.ids.length - 1);
      const done = lane.ids.length - start.length;
      lane.bar.value = done / count;
      lane.figures.textContent =
        lm.t("{count} tokens, {seconds} s, {millions} million multiplications", {
          count: done, seconds: lane.seconds.toFixed(2), millions: (lane.products / 1e6).toFixed(0),
        });
      await lm.pause();
    }
    if (!on()) return;
    const same = String(cached.ids) === String(whole.ids) ? lm.t("the same") : lm.t("different");
    controls.say(
      lm.t("Without the cache: {products} times the multiplications, {times} times as long, {same} tokens. With it, {rate} tokens a second.", {
        products: (whole.products / cached.products).toFixed(1), times: (whole.seconds / cached.seconds).toFixed(1),
        same, rate: (count / cached.seconds).toFixed(0),
      }));
  }
};
