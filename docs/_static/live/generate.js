/* Generation: one token at a time, each fed back in, as in generation/generate.py. */
"use strict";

/* A model and what it has read. */
lm.Session = class {
  constructor(model) {
    this.model = model;
    this.ids = []; // what the cache holds
    this.cache = model.cache();
  }

  /* The logits (V) after the tokens `ids`. What they share with those before is not read again. */
  logits(ids) {
    const known = this.last && ids.length === this.ids.length && ids.every((id, i) => id === this.ids[i]);
    if (!known) this.last = this.allLogits(ids, 1)[0];
    return this.last;
  }

  /* The logits after each of the last `count` of the tokens `ids`: an array of `count` times (V). */
  allLogits(ids, count) {
    this.last = undefined;
    let same = 0;
    while (same < ids.length - count && ids[same] === this.ids[same]) same++;
    this.cache.crop(same);
    this.ids = ids.slice(0, same); // a text that is too long ends here
    const logits = this.model.forward(ids.slice(same), { cache: this.cache, all: count > 1 });
    this.ids = ids.slice();
    const V = this.model.config.vocab_size;
    const rows = logits.length / V;
    return Array.from({ length: count }, (_, i) =>
      logits.subarray((rows - count + i) * V, (rows - count + i + 1) * V));
  }
};

/* What each token after the first costs, in bits: log2(1 / p), (T - 1), by the logits (T, V) of the
 * tokens `ids` (T). */
lm.costs = function (logits, ids) {
  const V = logits.length / ids.length;
  return ids.slice(1).map((id, t) => -Math.log2(lm.softmax(logits.subarray(t * V, (t + 1) * V))[id]));
};

lm.mean = (numbers) => numbers.reduce((a, b) => a + b, 0) / numbers.length;
