/* What the widgets share: shipped models, the state in the address, tokens, bars, sliders. */
"use strict";

lm.widgets = {};
const received = {}; // by name: what models/NAME.js has brought
const built = {};
const LONGEST = 2000; // letters of a text
let kept; // the state in the address that a widget began with or wrote; another is a link to follow

/* Called by models/NAME.js: a config, a tokenizer, and a safetensors file in base64; or a text to train on. */
lm.receive = (name, parts) => (received[name] = parts);

/* The model that ships with the package under this name, and its tokenizer; or that text. */
lm.shipped = function (name) {
  if (!built[name]) {
    const { config, tokenizer, weights } = received[name];
    if (!weights) return received[name];
    const bytes = Uint8Array.from(atob(weights), (letter) => letter.charCodeAt(0));
    const tensors = lm.readSafetensors(bytes.buffer);
    const kind = config.model_type === "qwen2" ? lm.Qwen2ForCausalLM : lm.GPT2LMHeadModel;
    const model = new kind(config, tensors);
    lm.kernel?.place(model.tensors);
    built[name] = { model, tokenizer: new lm.Tokenizer(tokenizer) };
    delete received[name];
  }
  return built[name];
};

/* What the reader of a widget changes. `values` are texts, and numbers as [value, least, largest,
 * step]. They stand in the address, as #ID?name=value&..., so that a teacher can send a link.
 * `show` draws what has changed, once for all changes of a moment. */
lm.Controls = class {
  constructor(place, tokenizer, values, show) {
    const start = `#${place.id}?`;
    const given = new URLSearchParams(location.hash.startsWith(start) ? location.hash.slice(start.length) : "");
    kept = location.hash;
    this.place = place;
    this.tokenizer = tokenizer;
    this.values = values;
    this.show = show;
    this.pending = []; // tokens whose characters are not complete yet
    for (const [name, value] of Object.entries(values)) {
      this[name] = Array.isArray(value) ? value[0] : value;
      if (given.has(name)) this[name] = this.allowed(name, given.get(name));
    }
  }

  allowed(name, value) {
    if (!Array.isArray(this.values[name])) return value.slice(0, LONGEST);
    const [first, least, largest, step] = this.values[name];
    if (value === "" || isNaN(value)) return first;
    const number = Math.min(Math.max(value, least), largest);
    return Number((least + Math.round((number - least) / step) * step).toFixed(2));
  }

  /* Draw in a moment, 30 times a second at most, or when nothing has changed for `wait` milliseconds. */
  change(news, wait = 0) {
    Object.assign(this, news);
    clearTimeout(this.waiting);
    if (wait) this.waiting = setTimeout(() => this.change({}), wait);
    else this.drawing ??= setTimeout(() => requestAnimationFrame(() => this.draw()), 20);
    clearTimeout(this.keeping); // browsers allow a few changes of the address a second
    this.keeping = setTimeout(() => this.keep(), 300);
  }

  draw() {
    this.drawing = undefined;
    if (this.area.value !== this.text) this.area.value = this.text;
    this.show();
  }

  /* Add a token to the text. One that is a part of a character waits for the rest of it. */
  write(id, news = {}) {
    this.pending.push(id);
    const more = this.tokenizer.decode(this.pending);
    const whole = !more.endsWith("\ufffd") || this.pending.length === 4;
    if (whole) this.pending = [];
    this.change({ ...news, text: whole ? this.text + more : this.text });
  }

  /* Say something: at once to the eye, and to the ear when it has not changed for a moment. */
  say(text) {
    this.place.querySelector(".live-status").textContent = text;
    clearTimeout(this.saying);
    const spoken = text.replace(/␣/g, " ").replace(/↵/g, lm.t(" line end ")).replace(/⊢/g, lm.t("start"));
    const status = this.place.querySelector("[role=status]");
    this.saying = setTimeout(() => (status.textContent = spoken), 500);
  }

  keep() {
    if (/^#live-[^?]*\?/.test(location.hash) && location.hash !== kept) return; // this page loads again
    const all = Object.keys(this.values).map((name) => [name, String(this[name])]);
    const now = all.filter(([, value]) => value.length <= LONGEST); // an address has no room for more
    history.replaceState(null, "", `#${this.place.id}?${new URLSearchParams(now)}`);
    kept = location.hash;
  }

  /* The text to edit; `more` changes with it, and it is drawn after `wait` milliseconds. */
  field(label, more = {}, wait = 200, longest = LONGEST) {
    this.area = lm.element("textarea", {
      rows: 2, maxlength: longest, spellcheck: "false", "aria-label": label,
      oninput: () => {
        this.pending = [];
        this.change({ ...more, text: this.area.value }, wait);
      },
    });
    this.area.value = this.text;
    this.note = lm.element("p", { class: "live-note" });
    return lm.element("div", {}, this.area, this.note);
  }

  /* The ids of the text from the start of a document: the first ones, if there are more than `most`. */
  ids(most) {
    const all = [0, ...this.tokenizer.encode(this.text), ...this.pending];
    this.note.textContent = all.length > most ? lm.t("Only the first {count} tokens are read.", { count: most }) : "";
    return all.slice(0, most);
  }

  /* The same with the last ones. They go in blocks, so that the next token has the same beginning,
   * which is not read again. */
  lastIds(most) {
    const all = [0, ...this.tokenizer.encode(this.text), ...this.pending];
    const block = most / 2;
    const gone = Math.max(0, Math.ceil((all.length - most) / block) * block);
    this.note.textContent = gone ? lm.t("Only the last {count} tokens are read.", { count: all.length - gone }) : "";
    return [0, ...all.slice(1 + gone)];
  }

  slider(label, name) {
    const [, min, max, step] = this.values[name];
    const output = lm.element("span", { "aria-hidden": "true" }, String(this[name]));
    const input = lm.element("input", {
      type: "range", min, max, step, value: this[name],
      oninput: () => {
        output.textContent = input.value;
        this.change({ [name]: Number(input.value) });
      },
    });
    return lm.element("label", { class: "live-slider" }, label, input, output);
  }
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

lm.button = (label, onclick) => lm.element("button", { type: "button", onclick }, label);

/* A button that begins work and, as long as it goes on, ends it: `work` asks whether it may. */
lm.workButton = function (label, work) {
  let on = false;
  const set = (now) => {
    on = now;
    button.textContent = on ? lm.t("Stop") : label;
  };
  const button = lm.button(label, async () => {
    set(!on);
    if (!on) return;
    await work(() => on);
    set(false);
  });
  return button;
};

/* A group of buttons is one stop for the tabulator; arrows lead on inside, by so many to the right
 * and down. */
lm.withArrows = function (group, right, down) {
  group.addEventListener("keydown", (event) => {
    const steps = { ArrowRight: right, ArrowLeft: -right, ArrowDown: down, ArrowUp: -down };
    const buttons = [...group.querySelectorAll("button")];
    const next = buttons[buttons.indexOf(document.activeElement) + steps[event.key]];
    if (!next) return;
    event.preventDefault();
    next.focus();
    next.click();
  });
  return group;
};

/* Put children in the place of those that are there. The keyboard stays where it was. */
lm.replace = function (parent, ...children) {
  const buttons = () => [...parent.querySelectorAll("button")];
  const at = buttons().indexOf(document.activeElement);
  parent.replaceChildren(...children);
  if (at >= 0) buttons()[Math.min(at, buttons().length - 1)]?.focus();
};

/* A token as a label: blanks and line ends are visible. */
lm.shown = function (tokenizer, id) {
  if (tokenizer.special.has(id)) return "⊢";
  const text = tokenizer.decode([id]);
  return text.replace(/\n/g, "↵").replace(/\t/g, "⇥").replace(/ /g, "␣");
};

lm.percent = (share, digits = 1) => `${(100 * share).toFixed(digits)} %`;

/* Tokens one after the other, in turn in one of six colours, each with a small text below. */
lm.tokenRow = (tokenizer, ids, below) =>
  lm.element("ol", { class: "live-tokens" }, ...ids.map((id, i) => lm.token(tokenizer, id, i, below)));

lm.token = (tokenizer, id, i, below = String) =>
  lm.element("li", { class: `live-token live-colour-${i % 6}` },
    lm.shown(tokenizer, id), lm.element("small", {}, below(id, i)));

/* A label, a share of the full length, and a number. With `click` it is a button. */
lm.bar = function (label, share, number, click) {
  const content = [lm.element("span"), lm.element("span")];
  const bar = click
    ? lm.element("button", { class: "live-bar", type: "button", onclick: click }, ...content)
    : lm.element("span", { class: "live-bar" }, ...content);
  const item = lm.element("li", {}, bar);
  item.set = (label, share, number = lm.percent(share)) => {
    bar.style.setProperty("--p", share);
    content[0].textContent = label;
    content[1].textContent = number;
  };
  item.set(label, share, number);
  return item;
};

lm.bars = (...items) => lm.element("ol", { class: "live-bars" }, ...items);

/* The `count` likeliest tokens, as bars. */
lm.likeliest = (tokenizer, probabilities, count) =>
  lm.best(probabilities, count).map((id) =>
    lm.bar(lm.shown(tokenizer, id), probabilities[id], lm.percent(probabilities[id])));

/* Let the browser do what it must. (A timer would wait for four milliseconds, as long as a token takes.) */
const waiting = [];
const { port1, port2 } = new MessageChannel();
port1.onmessage = () => waiting.shift()();
lm.pause = () =>
  new Promise((resolve) => {
    waiting.push(resolve);
    port2.postMessage(null);
  });

/* Numbers as cells in a row: the stronger the colour, the larger, up to `most`; orange is above 0,
 * blue below. The root keeps small ones in sight. */
lm.strip = function (numbers, most = Math.max(...numbers.map(Math.abs))) {
  const cells = [...numbers].map((number) =>
    lm.element("span", { class: number < 0 ? "live-below" : "live-above", style: `--p: ${Math.sqrt(Math.abs(number) / most)}` }));
  return lm.element("figure", { class: "live-figure" },
    lm.element("div", { class: "live-strip", role: "img", "aria-label": lm.t("{count} numbers as colours", { count: numbers.length }) }, ...cells),
    lm.element("figcaption", {},
      lm.t("{count} numbers, from {least} to {largest}", {
        count: numbers.length, least: Math.min(...numbers).toFixed(2), largest: Math.max(...numbers).toFixed(2),
      })));
};
