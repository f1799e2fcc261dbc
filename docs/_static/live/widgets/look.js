/* Where does it look? All heads as small maps, one of them as a text. */
"use strict";

lm.widgets.look = function (place, { model, tokenizer }) {
  const { n_layer, n_head } = model.config;
  const MOST = 64; // tokens
  const controls = new lm.Controls(place, tokenizer, {
    text: place.dataset.prompt, layer: [2, 0, n_layer - 1, 1], head: [2, 0, n_head - 1, 1],
    token: [-1, -1, MOST - 1, 1], silent: "",
  }, show);
  let read = {}; // what the model did with a text, some heads being silent

  const maps = lm.element("div", { class: "live-heads", role: "group", "aria-label": lm.t("All heads") });
  const tokens = lm.element("ol", { class: "live-tokens" });
  const silence = lm.button(lm.t("Silence this head"), toggle);
  lm.withArrows(maps, n_head, 1); // a column is a block
  lm.withArrows(tokens, 1, 1);
  place.append(controls.field(lm.t("A text"), { token: -1 }), tokens, place.querySelector(".live-status"),
    lm.element("div", { class: "live-buttons" }, silence),
    lm.element("p", {}, lm.t("Each square is a head, each column of squares a block of the model. Inside a square a row is a token, and coloured cells show where it looks.")), maps);

  /* The weights of every layer and head, and the mean surprise, of a text. */
  function run(ids, silent) {
    const weights = [];
    model.silent = new Set(silent);
    const watch = (stage, layer, heads) => stage === "attention" && (weights[layer] = heads);
    const bits = lm.mean(lm.costs(model.forward(ids, { all: true, watch }), ids));
    model.silent = new Set();
    return { weights, bits };
  }

  const names = Array.from({ length: n_layer * n_head }, (_, i) => `${Math.floor(i / n_head)}.${i % n_head}`);
  const silent = () => controls.silent.split(",").filter((one) => names.includes(one));
  const name = () => `${controls.layer}.${controls.head}`;

  function toggle() {
    const others = silent().filter((one) => one !== name());
    controls.change({ silent: (others.length < silent().length ? others : [...others, name()]).join() });
  }

  function show() {
    const ids = controls.ids(MOST);
    const key = `${ids}|${silent()}`;
    if (read.key !== key) {
      const whole = read.ids === String(ids) ? read.whole : run(ids, []);
      read = { key, ids: String(ids), whole, now: silent().length ? run(ids, silent()) : whole };
      drawMaps(ids.length);
    }
    for (const button of maps.children) {
      button.setAttribute("aria-pressed", String(button.dataset.name === name()));
      button.tabIndex = button.dataset.name === name() ? 0 : -1;
    }
    const from = controls.token < 0 || controls.token >= ids.length ? ids.length - 1 : controls.token;
    const row = read.now.weights[controls.layer][controls.head].subarray(from * ids.length, (from + 1) * ids.length);
    lm.replace(tokens, ...ids.map((id, t) => tokenButton(id, t, row[t], t === from)));
    const isSilent = silent().includes(name());
    silence.textContent = isSilent ? lm.t("Let it speak again") : lm.t("Silence this head");
    const most = lm.argmax(row);
    controls.say(
      lm.t("Block {layer}, head {head}{silent}: “{from}” looks mostly at “{to}” ({share}).", {
        layer: controls.layer, head: controls.head, silent: isSilent ? lm.t(", silent") : "",
        from: lm.shown(tokenizer, ids[from]), to: lm.shown(tokenizer, ids[most]), share: lm.percent(row[most], 0),
      }) + surprise());
  }

  function surprise() {
    const { whole, now } = read;
    if (isNaN(whole.bits)) return "";
    const bits = { now: now.bits.toFixed(2), whole: whole.bits.toFixed(2) };
    return silent().length
      ? lm.t(" A token of this text surprises the model by {now} bits on average, and by {whole} when all heads speak.", bits)
      : lm.t(" A token of this text surprises the model by {now} bits on average.", bits);
  }

  function tokenButton(id, t, weight, chosen) {
    return lm.element("li", {}, lm.element("button", {
      type: "button", class: "live-looked", style: `--p: ${weight}`, "aria-pressed": String(chosen), tabindex: chosen ? 0 : -1,
      onclick: () => controls.change({ token: t }),
    }, lm.shown(tokenizer, id), lm.element("small", {}, weight < 0.005 ? "" : lm.percent(weight, 0))));
  }

  /* A pixel for each weight: the row looks at the column. */
  function drawMaps(T) {
    const ink = getComputedStyle(place).getPropertyValue("--pst-color-accent");
    const pictures = read.now.weights.flatMap((heads, layer) => heads.map((weights, head) => {
      const map = lm.element("canvas", { width: T, height: T });
      const pen = map.getContext("2d");
      pen.fillStyle = ink;
      weights.forEach((weight, i) => {
        if (weight < 0.01) return;
        pen.globalAlpha = weight;
        pen.fillRect(i % T, Math.floor(i / T), 1, 1);
      });
      const off = silent().includes(`${layer}.${head}`);
      return lm.element("button", {
        type: "button", class: off ? "live-off" : undefined, "data-name": `${layer}.${head}`,
        "aria-label": lm.t("block {layer}, head {head}", { layer, head }) + (off ? lm.t(", silent") : ""),
        onclick: () => controls.change({ layer, head }),
      }, map);
    }));
    lm.replace(maps, ...pictures);
  }

  show();
};
