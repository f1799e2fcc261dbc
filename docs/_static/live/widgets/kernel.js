/* The same products in plain JavaScript and in the kernel, in turns, on the reader's machine. */
"use strict";

lm.widgets.kernel = function (place, { model, tokenizer }) {
  const [SLICES, SLICE] = [10, 100]; // of each: so many, of so many milliseconds
  const controls = new lm.Controls(place, tokenizer, {}, () => {}); // for its status
  const { kernel } = lm;
  const head = model.headWeight;
  const [O, I] = head.shape;
  const x = Float32Array.from({ length: I }, (_, i) => Math.sin(i));
  const cache = model.cache();

  const token = () => {
    if (cache.length === 64) cache.crop(32); // the same length of text for both
    model.forward([1], { cache });
  };
  const tasks = [
    { name: `The largest matrix, ${O} by ${I}`, work: () => lm.linear(x, head) },
    { name: "The whole model, for one token", work: token },
  ].map((task) => ({ ...task, bars: ["plain JavaScript", "kernel"].map((way) => lm.bar(way, 0, "")) }));

  const go = lm.workButton("Measure here", run);
  place.append(lm.element("div", { class: "live-buttons" }, go),
    ...tasks.flatMap(({ name, bars }) => [lm.element("p", {}, `${name}, times a second:`), lm.bars(...bars)]),
    place.querySelector(".live-status"));
  go.disabled = !kernel;
  controls.say(kernel ? `The kernel has ${kernel.bytes.length} bytes. Measuring takes four seconds.`
    : "This browser does not run the kernel: it has no such instructions, or the page may not use them. All widgets run in plain JavaScript.");

  /* How often a task was done in a while, as times a second. */
  function rate(work) {
    const begin = performance.now();
    let count = 0;
    while (performance.now() - begin < SLICE) {
      work();
      count++;
    }
    return (count * 1e3) / (performance.now() - begin);
  }

  const median = (numbers) => Float64Array.from(numbers).sort()[numbers.length >> 1];

  async function run(on) {
    controls.say("Measuring.");
    const found = [];
    for (const [k, { work, bars }] of tasks.entries()) {
      const rates = [[], []];
      for (let n = 0; on() && n < SLICES; n++) {
        [null, kernel].forEach((way, i) => {
          lm.kernel = way;
          rates[i].push(rate(work));
          lm.kernel = kernel;
        });
        const [plain, fast] = rates.map(median);
        bars[0].set("plain JavaScript", plain / Math.max(plain, fast), plain.toFixed(0));
        bars[1].set("kernel", fast / Math.max(plain, fast), fast.toFixed(0));
        found[k] = fast / plain;
        await lm.pause();
      }
    }
    if (!on()) return controls.say("Stopped.");
    const [matrix, whole] = found.map((times) => times.toFixed(1));
    controls.say(`Here the kernel is ${matrix} times as fast for the matrix, and ${whole} times for a whole token.`);
  }
};
