/* Train: a small GPT-2 learns a text while the reader watches. */
"use strict";

lm.widgets.train = function (place, { texts }) {
  const RATES = [0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1];
  const [LEAST, LONGEST] = [300, 100_000]; // characters of a text
  const WRITTEN = 140; // characters of a sample
  const KEPT = [0, 30, 100, 300, 1000, 3000]; // steps whose samples stay
  const ENOUGH = 5000; // steps, then it waits
  const story = document.documentElement.lang.startsWith("zh") ? texts.chinese : texts.english;
  const controls = new lm.Controls(place, undefined, { rate: "0.01", seed: [0, 0, 9, 1], text: "" }, show);
  const rate = () => (RATES.includes(Number(controls.rate)) ? Number(controls.rate) : 0.01);

  let run; // undefined where the text is too short
  let chosen; // the text and the seed of the run
  let earlier = []; // other runs on the same text
  let on = false;
  let turn = 0; // of the loop that may go on
  let inSight = true;
  let wake = () => {};
  let told; // what the status says

  const main = lm.button(lm.t("Train"), () => (on ? pause() : go()));
  const again = lm.button(lm.t("Start over"), () => (start(), go()));
  const figures = lm.element("p", { class: "live-figures" });
  const curve = lm.element("div", { class: "live-figure" });
  const lead = lm.element("p");
  const sample = lm.element("p", { class: "said live-sample" });
  const samples = lm.element("ol", { class: "live-rounds live-samples" });
  const field = controls.field(lm.t("A text of your own"), {}, 400, LONGEST);
  controls.area.placeholder = lm.t("Or paste a text of your own, of {least} characters or more: a story, songs, code.", { least: LEAST });
  place.append(
    lm.element("div", { class: "live-buttons" }, main, again),
    lm.element("div", { class: "live-sliders" }, rateSlider(), controls.slider(lm.t("random start"), "seed")),
    lm.element("div", { class: "live-sides" },
      lm.element("div", {}, figures, curve), lm.element("div", {}, lead, sample)),
    place.querySelector(".live-status"),
    lm.element("p", {}, lm.t("What it wrote along the way, and after how many steps:")), samples, field);
  new IntersectionObserver((seen) => {
    inSight = seen.at(-1).isIntersecting;
    if (inSight) wake();
  }).observe(place);

  /* Each place of this slider is about three times the one before it. */
  function rateSlider() {
    const output = lm.element("span", { "aria-hidden": "true" });
    const input = lm.element("input", {
      type: "range", min: 0, max: RATES.length - 1, step: 1, value: RATES.indexOf(rate()),
      oninput: () => {
        controls.change({ rate: String(RATES[input.value]) });
        name();
      },
    });
    const name = () => {
      input.setAttribute("aria-valuetext", rate());
      output.textContent = rate();
    };
    name();
    return lm.element("label", { class: "live-slider" }, lm.t("learning rate"), input, output);
  }

  /* A new model. The curves of earlier ones stay as long as the text is the same. */
  function start() {
    const text = controls.text || story;
    if (run && text === chosen.text && run.losses.length >= 20) earlier = [...earlier, run].slice(-2);
    if (text !== chosen?.text) earlier = [];
    chosen = { text, seed: controls.seed };
    run = undefined;
    samples.replaceChildren();
    const length = Array.from(text).length;
    controls.note.textContent =
      length < LEAST ? lm.t("Your text has {length} characters. Training needs at least {least}.", { length, least: LEAST })
      : controls.text.length >= LONGEST ? lm.t("Only the first {count} characters are read.", { count: counted(LONGEST) })
      : controls.text.length > 2000 ? lm.t("Training on your text: {length} characters, too many for a link.", { length: counted(length) })
      : controls.text ? lm.t("Training on your text: {length} characters.", { length: counted(length) })
      : lm.t("Training on {length} characters of small stories: “{begin}…”", { length: counted(length), begin: story.slice(0, 60) });
    if (length < LEAST) return;
    run = new lm.Run(lm.widgets.train.sizes, text, { seed: controls.seed });
    run.rates = []; // of each step
    run.work = work(run);
    run.words = new Set(words(text));
    run.size = run.optimizer.tensors.reduce((sum, { data }) => sum + data.length, 0);
    run.uniform = Math.log(run.tokenizer.letters.length); // the loss of who finds all characters equally likely
    run.frequent = lm.entropy(run.stream); // and of who knows how frequent each is
  }

  /* What there is to do, in small pieces: steps, and a sample about every second. */
  function* work(run) {
    for (let last = -Infinity; ; ) {
      const step = run.losses.length;
      if (KEPT.includes(step) || (step % 20 === 0 && performance.now() - last > 900)) {
        last = performance.now();
        run.sample = { step, text: yield* run.write(WRITTEN) };
        if (KEPT.includes(step)) samples.append(lm.element("li", { value: step }, firstLine(run.sample.text)));
      }
      run.rates.push(rate());
      yield* run.step(run.rates.at(-1));
    }
  }

  /* A few milliseconds of work, then the page has its turn. A hidden tab gets no frames, and so no work. */
  async function go() {
    told = undefined;
    if (!run) return show();
    on = true;
    for (const mine = ++turn; on && mine === turn; ) {
      await new Promise(requestAnimationFrame);
      while (!inSight) await new Promise((resolve) => (wake = resolve));
      const [begin, first] = [performance.now(), run.losses.length];
      while (on && mine === turn && performance.now() < begin + 120) {
        for (const until = performance.now() + 10; performance.now() < until; ) run.work.next();
        await lm.pause();
      }
      if (mine !== turn) return;
      const speed = ((run.losses.length - first) * 1e3) / (performance.now() - begin);
      run.speed = run.speed ? 0.9 * run.speed + 0.1 * speed : speed;
      if (first < ENOUGH && run.losses.length >= ENOUGH) pause();
      show();
    }
  }

  function pause() {
    on = false;
    turn++;
    show();
  }

  function show() {
    if ((controls.text || story) !== chosen?.text || controls.seed !== chosen.seed) {
      on = false;
      turn++;
      start();
    }
    const step = run?.losses.length;
    main.textContent = on ? lm.t("Pause") : step ? lm.t("Go on") : lm.t("Train");
    main.setAttribute("aria-disabled", String(!run));
    again.setAttribute("aria-disabled", String(!step));
    figures.textContent = step
      ? lm.t("Step {step}: loss {loss}, {speed} steps a second", { step, loss: recent().toFixed(2), speed: (run.speed ?? 0).toFixed(run.speed < 10 ? 1 : 0) }) : "";
    curve.replaceChildren(...(step ? [lm.lossCurves([...earlier, run], curve.clientWidth)] : []));
    lead.textContent = sample.textContent = "";
    if (run?.sample) showSample(run.sample);
    if (!run) sample.textContent = controls.note.textContent;
    tell();
  }

  const words = (text) => text.match(/\p{L}+/gu) ?? [];
  const firstLine = (text) => text.trim().replace(/\s+/g, " ").slice(0, 45);
  const counted = (number) => number.toLocaleString("en");
  const recent = () => lm.mean(run.losses.slice(-20));

  /* Words that the text has stand out. */
  function showSample({ step, text }) {
    const all = words(text);
    lead.textContent = lm.t("After {step} steps it writes this. Words that are in the text: {known} of {count}.", {
      step, known: all.filter((word) => run.words.has(word)).length, count: all.length,
    });
    sample.append(...text.split(/(\p{L}+)/u).map((part) => (run.words.has(part) ? lm.element("b", {}, part) : part)));
  }

  /* What is said aloud, too: how it goes, after some steps and when that changes. */
  function tell() {
    const step = run?.losses.length;
    const stage = KEPT.findLast((kept) => kept <= step);
    const verdict = !run || step < 40 ? "" : judged(step);
    const now = `${on} ${stage} ${verdict} ${controls.note.textContent}`;
    if (now === told) return;
    told = now;
    controls.say(
      !run ? controls.note.textContent
      : !step && !on ? ""
      : [on && stage === 0 ? lm.t("Training: each step changes {count} numbers a little.", { count: counted(run.size) })
        : on ? lm.t("After {step} steps the loss is {loss}.", { step, loss: recent().toFixed(2) })
        : lm.t("Paused after {step} steps, at a loss of {loss}.", { step, loss: recent().toFixed(2) }), verdict].join(" "));
  }

  function judged(step) {
    if (run.frequent < 0.1) return lm.t("Nearly all characters of this text are the same: there is little to learn.");
    if (recent() > run.uniform + 0.1) {
      return lm.t("That is worse than a uniform guess: the steps are too long. Try a smaller learning rate.");
    }
    if (step < 200 || recent() < run.frequent - 0.1) return "";
    return run.rates.at(-1) > 0.02
      ? lm.t("It knows at most how frequent each character is: the steps are too long. Try a smaller learning rate.")
      : lm.t("So far it knows at most how frequent each character is: its steps are short.");
  }

  start();
  go();
};
lm.widgets.train.sizes = { n_layer: 2, n_head: 4, n_embd: 32, n_positions: 32, layer_norm_epsilon: 1e-5, initializer_range: 0.08 };
lm.widgets.train.scripts = ["gradients", "training"];

/* The loss curves of runs on one text, so many pixels wide; that of the last is the strong one. Each point is
 * the mean of some steps. */
lm.lossCurves = function (runs, width) {
  const [height, left, above, below] = [190, 34, 10, 24];
  const last = runs.at(-1);
  const longest = Math.max(...runs.map(({ losses }) => losses.length));
  const each = Math.ceil(longest / 120);
  const curves = runs.map(({ losses }) =>
    Array.from({ length: Math.ceil(losses.length / each) }, (_, i) => lm.mean(losses.slice(i * each, (i + 1) * each))));
  const right = 1.02 * Math.max(100, longest);
  const top = Math.max(1.12 * last.uniform, 1.05 * Math.max(...curves.flat()), 0.1);
  const x = (step) => left + ((width - left - 4) * step) / right;
  const y = (loss) => above + (height - above - below) * (1 - loss / top);

  const text = (content, x, y, anchor = "end") => lm.svg("text", { x, y, "text-anchor": anchor }, content);
  const line = (loss, kind) => lm.svg("line", { class: kind, x1: left, x2: width, y1: y(loss), y2: y(loss) });
  const parts = [line(0, "live-axis"), text(lm.t("step"), left - 5, height - below + 14), text(lm.t("loss"), left + 4, above + 4, "start")];
  parts.push(...lm.ticks(top).map((loss) => text(String(loss), left - 5, y(loss) + 4)));
  parts.push(...lm.ticks(right).slice(1).map((step) => text(String(step), x(step), height - below + 14, "middle")));
  parts.push(line(last.uniform, "live-uniform"), text(lm.t("uniform guess"), width - 2, y(last.uniform) - 4));
  if (y(last.frequent) - y(last.uniform) > 14) {
    parts.push(line(last.frequent, "live-frequent"), text(lm.t("frequencies alone"), width - 2, y(last.frequent) - 4));
  }
  runs.forEach(({ losses, rates }, i) => {
    const points = curves[i].map((loss, n) => `${x((n + 0.5) * each).toFixed(1)},${y(loss).toFixed(1)}`).join(" ");
    parts.push(lm.svg("polyline", { class: runs[i] === last ? "live-now" : "live-earlier", points }));
    if (runs.length > 1) parts.push(text(String(rates[rates.length >> 1]), x(losses.length), y(curves[i].at(-1)) - 4));
  });
  const label = lm.t("The loss, from {first} to {last} in {step} steps. A uniform guess has {uniform}.", {
    first: last.losses[0].toFixed(2), last: lm.mean(last.losses.slice(-20)).toFixed(2),
    step: last.losses.length, uniform: last.uniform.toFixed(2),
  });
  return lm.svg("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": label, class: "live-curve" }, ...parts);
};

/* An element of a drawing. */
lm.svg = function (name, attributes, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  element.append(...children);
  return element;
};

/* Three to six round numbers from 0 to `most`. */
lm.ticks = function (most) {
  const power = 10 ** Math.floor(Math.log10(most / 2));
  const step = [1, 2, 5, 10].map((n) => n * power).find((step) => most / step < 6);
  return Array.from({ length: Math.floor(most / step) + 1 }, (_, i) => Number((i * step).toPrecision(3)));
};

/* -sum of p log p over the different tokens of a text, by how frequent each is. */
lm.entropy = function (ids) {
  const counts = new Map();
  for (const id of ids) counts.set(id, (counts.get(id) ?? 0) + 1);
  return [...counts.values()].reduce((sum, count) => sum - (count / ids.length) * Math.log(count / ids.length), 0);
};
