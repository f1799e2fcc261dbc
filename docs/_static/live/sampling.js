/* From logits to the next token, as in generation/sampling.py. */
"use strict";

/* Bent and cut logits (V); -Infinity where a token cannot be drawn. */
lm.sampled = function (logits, { temperature = 1, top_k = 0, top_p = 1 } = {}) {
  let bent = new Float64Array(logits);
  if (temperature !== 0 && temperature !== 1) bent = bent.map((logit) => logit / temperature);
  if (top_k) bent = lm.keepTopK(bent, top_k);
  if (top_p < 1) bent = lm.keepTopP(bent, top_p);
  return bent;
};

/* Keep the k largest, and any equal to the smallest of these. */
lm.keepTopK = function (logits, k) {
  const top = new Float64Array(Math.min(k, logits.length)).fill(-Infinity); // in order
  for (let id = 0; id < logits.length; id++) {
    const logit = logits[id];
    if (logit <= top[0]) continue; // most are
    let i = 1;
    for (; i < top.length && top[i] < logit; i++) top[i - 1] = top[i];
    top[i - 1] = logit;
  }
  const kept = new Float64Array(logits.length).fill(-Infinity);
  for (let id = 0; id < logits.length; id++) if (logits[id] >= top[0]) kept[id] = logits[id];
  return kept;
};

/* Keep the smallest set of most likely tokens whose probability reaches p. */
lm.keepTopP = function (logits, p) {
  const probabilities = lm.softmax(logits);
  const order = [...probabilities.keys()].sort((a, b) => probabilities[b] - probabilities[a]);
  const kept = new Float64Array(logits.length).fill(-Infinity);
  let before = 0;
  for (const id of order) {
    if (before >= p) break;
    kept[id] = logits[id];
    before += probabilities[id];
  }
  return kept;
};

/* The probabilities lie end to end on the line from 0 to 1: the token into whose piece u falls. */
lm.draw = function (logits, u) {
  const probabilities = lm.softmax(logits);
  let end = 0;
  let last = 0;
  for (let id = 0; id < probabilities.length; id++) {
    if (probabilities[id] > 0) last = id;
    end += probabilities[id];
    if (u < end) return id;
  }
  return last; // beyond the line, by rounding
};

/* The most likely token. */
lm.argmax = (logits) => logits.reduce((best, logit, id) => (logit > logits[best] ? id : best), 0);

/* Logits with which a text cannot end: its end, token 0, is impossible. */
lm.withoutEnd = (logits) => logits.fill(-Infinity, 0, 1);

/* The ids of the `count` largest, those above 0, in order. */
lm.best = function (probabilities, count) {
  const best = [];
  probabilities.forEach((probability, id) => {
    if (probability === 0 || (best.length === count && probability <= probabilities[best.at(-1)])) return;
    best.push(id);
    best.sort((a, b) => probabilities[b] - probabilities[a]).splice(count);
  });
  return best;
};

/* All probability on one of V tokens. */
lm.oneHot = (V, id) => new Float64Array(V).fill(1, id, id + 1);

/* Numbers in [0, 1) that a seed repeats: mulberry32, thirty-two bits of state. */
lm.randomFrom = function (seed) {
  let state = seed >>> 0;
  return () => {
    state = (state + 0x6d2b79f5) >>> 0;
    let t = Math.imul(state ^ (state >>> 15), 1 | state);
    t = (t + Math.imul(t ^ (t >>> 7), 61 | t)) ^ t;
    return ((t ^ (t >>> 14)) >>> 0) / 2 ** 32;
  };
};
