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
  logits(ids, options = {}) {
    let same = 0;
    while (same < ids.length - 1 && ids[same] === this.ids[same]) same++;
    this.cache.crop(same);
    const logits = this.model.forward(ids.slice(same), { ...options, cache: this.cache });
    this.ids = ids.slice();
    return logits;
  }

  /* Forget everything: the model was changed. */
  reset() {
    this.ids = [];
    this.cache.crop(0);
  }
};

/* The surprise of each token after the first, in bits: log2(1 / p), (T - 1). */
lm.surprises = function (model, ids) {
  const V = model.config.vocab_size;
  const logits = model.forward(ids, { all: true }); // (T, V)
  return ids.slice(1).map((id, t) => {
    const probabilities = lm.softmax(logits.subarray(t * V, (t + 1) * V));
    return -Math.log2(probabilities[id]);
  });
};

lm.mean = (numbers) => numbers.reduce((a, b) => a + b, 0) / numbers.length;
