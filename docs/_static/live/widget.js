/* What the widgets share: shipped models, tokens as coloured words, bars, the state in the address. */
"use strict";

lm.widgets = {};
const received = {}; // by name: what models/NAME.js has brought
const built = {};

/* Called by models/NAME.js: a config, a tokenizer, and a safetensors file in base64. */
lm.receive = (name, parts) => (received[name] = parts);

/* The model that ships with the package under this name, and its tokenizer. */
lm.shipped = function (name) {
  if (!built[name]) {
    const { config, tokenizer, weights } = received[name];
    const bytes = Uint8Array.from(atob(weights), (letter) => letter.charCodeAt(0));
    const tensors = lm.readSafetensors(bytes.buffer);
    const kind = config.model_type === "qwen2" ? lm.Qwen2ForCausalLM : lm.GPT2LMHeadModel;
    built[name] = { model: new kind(config, tensors), tokenizer: new lm.Tokenizer(tokenizer) };
    delete received[name];
  }
  return built[name];
};

/* An element with attributes and children. */
lm.element = function (name, attributes = {}, ...children) {
  const element = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (key.startsWith("on")) element.addEventListener(key.slice(2), value);
    else if (value === true) element.setAttribute(key, "");
    else if (value !== false && value !== undefined) element.setAttribute(key, value);
  }
  element.append(...children);
  return element;
};

/* A token as a label: blanks and line ends are visible. */
lm.shown = function (tokenizer, id) {
  if (tokenizer.special.has(id)) return "⊢";
  const text = tokenizer.decode([id]);
  return text.replace(/\n/g, "↵").replace(/\t/g, "⇥").replace(/ /g, "·");
};

/* Tokens one after the other, in turn in one of six colours, with their ids. */
lm.tokenRow = function (tokenizer, ids) {
  const items = ids.map((id, i) =>
    lm.element(
      "li",
      { class: `live-token live-colour-${i % 6}`, title: `token ${id}` },
      lm.shown(tokenizer, id),
      lm.element("small", {}, String(id)),
    ),
  );
  return lm.element("ol", { class: "live-tokens" }, ...items);
};

/* A slider with its name and value. */
lm.slider = function (label, { min, max, step, value, change }) {
  const output = lm.element("output", {}, String(value));
  const input = lm.element("input", {
    type: "range", min, max, step, value,
    oninput: () => {
      output.textContent = input.value;
      change(Number(input.value));
    },
  });
  const whole = lm.element("label", { class: "live-slider" }, `${label} `, input, " ", output);
  whole.set = (number) => {
    input.value = number;
    output.textContent = input.value;
  };
  return whole;
};

/* The state of a widget in the address: #ID?name=value&... A teacher sends it as a link. */
lm.stateOf = function (place, defaults) {
  const [id, query] = location.hash.slice(1).split("?");
  if (id !== place.id) return { ...defaults };
  const given = Object.fromEntries(new URLSearchParams(query ?? ""));
  return Object.fromEntries(
    Object.entries(defaults).map(([name, value]) => {
      const found = given[name];
      if (found === undefined) return [name, value];
      return [name, typeof value === "number" ? Number(found) || 0 : found];
    }),
  );
};

lm.keepState = function (place, state) {
  const query = new URLSearchParams(Object.entries(state).map(([k, v]) => [k, String(v)]));
  history.replaceState(null, "", `#${place.id}?${query}`);
};

/* A text to edit. */
lm.field = function (label, value, change) {
  const text = lm.element("textarea", {
    rows: 3, spellcheck: "false", "aria-label": label, oninput: () => change(text.value),
  });
  text.value = value;
  return text;
};

/* A token, and its probability as a length and a number. With `click` it is a button. */
lm.bar = function (tokenizer, id, probability, click) {
  const content = [
    lm.element("span", {}, lm.shown(tokenizer, id)),
    lm.element("span", {}, `${(100 * probability).toFixed(1)} %`),
  ];
  const attributes = { class: "live-bar", style: `--p: ${probability}` };
  const bar = click
    ? lm.element("button", { ...attributes, type: "button", onclick: click }, ...content)
    : lm.element("span", attributes, ...content);
  return lm.element("li", {}, bar);
};
