/* Where does it look? The weights of one head, from the token that the reader chooses. */
"use strict";

lm.widgets.look = function (place, { model, tokenizer }) {
  const { n_layer, n_head, block_size } = model.config;
  const state = lm.stateOf(place, {
    text: place.dataset.prompt, layer: 2, head: 2, token: -1, silent: "",
  });
  const text = lm.field("A text", state.text, (value) => change({ text: value, token: -1 }));
  const layer = lm.slider("layer", {
    min: 0, max: n_layer - 1, step: 1, value: state.layer, change: (value) => change({ layer: value }),
  });
  const head = lm.slider("head", {
    min: 0, max: n_head - 1, step: 1, value: state.head, change: (value) => change({ head: value }),
  });
  const silence = lm.element("input", { type: "checkbox", onchange: () => toggle() });
  const tokens = lm.element("ol", { class: "live-tokens" });
  const said = lm.element("p", { role: "status" });
  place.append(
    text, tokens,
    lm.element("div", { class: "live-sliders" }, layer, head,
      lm.element("label", {}, silence, " silence this head")),
    said,
  );

  const ids = () => [0, ...tokenizer.encode(state.text)].slice(0, block_size);

  function change(news) {
    Object.assign(state, news);
    lm.keepState(place, state);
    show();
  }

  function toggle() {
    const silent = new Set(state.silent.split(",").filter(Boolean));
    const name = `${state.layer}.${state.head}`;
    silent.delete(name) || silent.add(name);
    change({ silent: [...silent].join() });
  }

  function show() {
    const now = ids();
    const from = state.token < 0 || state.token >= now.length ? now.length - 1 : state.token;
    model.silent = new Set();
    const whole = lm.mean(lm.surprises(model, now));
    model.silent = new Set(state.silent.split(",").filter(Boolean));
    silence.checked = model.silent.has(`${state.layer}.${state.head}`);
    let row;
    model.forward(now, {
      watch: (stage, at, weights) => {
        if (stage === "attention" && at === state.layer) {
          row = weights[state.head].subarray(from * now.length, (from + 1) * now.length);
        }
      },
    });
    tokens.replaceChildren(
      ...now.map((id, t) =>
        lm.element("li", {}, lm.element(
          "button",
          {
            type: "button", class: "live-looked", style: `--p: ${row[t]}`,
            "aria-pressed": String(t === from), title: `${(100 * row[t]).toFixed(1)} %`,
            onclick: () => change({ token: t }),
          },
          lm.shown(tokenizer, id),
        )),
      ),
    );
    const most = lm.argmax(row);
    const broken = lm.mean(lm.surprises(model, now));
    said.textContent =
      `From “${lm.shown(tokenizer, now[from])}” this head looks mostly at ` +
      `“${lm.shown(tokenizer, now[most])}” (${(100 * row[most]).toFixed(0)} %). ` +
      `The text costs ${broken.toFixed(2)} bits a token` +
      (model.silent.size ? `, with all heads ${whole.toFixed(2)}.` : ".");
    model.silent = new Set();
  }

  show();
};
