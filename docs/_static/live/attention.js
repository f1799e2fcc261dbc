/* Attention, its cache and its rotation, as in attention/, cache/ and layers/rope.py. */
"use strict";

/* The keys and values of the tokens so far, a buffer of `room` rows (Hkv * D) for each layer. */
lm.KVCache = class {
  constructor(layers, room, width, numbers = Float32Array) {
    this.room = room;
    this.length = 0;
    const buffer = () => new numbers(room * width);
    this.layers = Array.from({ length: layers }, () => ({ k: buffer(), v: buffer() }));
  }

  /* Raises an error where `count` more tokens find no place. */
  check(count) {
    const length = this.length + count;
    if (length > this.room) throw new Error(`the sequence has ${length} tokens, but block_size=${this.room}`);
  }

  /* Put new k and v (T, Hkv * D) after the old ones; all so far, (S, Hkv * D). */
  update(layer, k, v) {
    const held = this.layers[layer];
    const width = held.k.length / this.room;
    held.k.set(k, this.length * width);
    held.v.set(v, this.length * width);
    const end = this.length * width + k.length;
    return [held.k.subarray(0, end), held.v.subarray(0, end)];
  }

  /* Forget what stands at `length` and after it. */
  crop(length) {
    this.length = Math.min(this.length, length);
  }
};

/* y_t = sum over s <= t of softmax_s(q_t k_s / sqrt(D)) v_s, head by head.
 *
 * q (T, H * D) are the last T of S tokens, whose k and v are (S, Hkv * D); groups of H / Hkv query
 * heads share one of keys and values. Returns y (T, H * D) and the weights, H arrays of (T, S). */
lm.attention = function (q, k, v, { n_head, n_kv_head, head_dim }, broken = {}) {
  const [H, D, width] = [n_head, head_dim, n_kv_head * head_dim];
  const [T, S] = [q.length / (H * D), k.length / width];
  const scale = broken.noScale ? 1 : 1 / Math.sqrt(D);
  const y = new q.constructor(T * H * D);
  const weights = Array.from({ length: H }, () => new q.constructor(T * S));
  const products = lm.kernel?.attend(k, v, width, D) ?? plain(k, v, width, D);
  for (let h = 0; h < H; h++) {
    const from = Math.floor((h * n_kv_head) / H) * D; // where its keys and values begin in a row
    for (let t = 0; t < T; t++) {
      const seen = broken.noMask ? S : S - T + t + 1; // itself and the tokens before it
      const [begin, end] = [(t * H + h) * D, (t * H + h + 1) * D];
      const scores = new Float64Array(seen);
      products.scores(q.subarray(begin, end), from, scale, scores);
      const row = lm.softmax(scores);
      weights[h].set(row, t * S);
      products.sum(row, from, y.subarray(begin, end));
    }
  }
  return { y, weights };
};

/* The two products of attention, for one query q (D) and the row y (D) that it gets. Where keys and values lie
 * in float32, the kernel has the same. */
const plain = (k, v, width, D) => ({
  scores(q, from, scale, scores) {
    for (let s = 0; s < scores.length; s++) {
      let dot = 0;
      const key = s * width + from;
      for (let d = 0; d < D; d++) dot += q[d] * k[key + d];
      scores[s] = dot * scale;
    }
  },
  sum(weights, from, y) {
    for (let s = 0; s < weights.length; s++) {
      const value = s * width + from;
      for (let d = 0; d < D; d++) y[d] += weights[s] * v[value + d];
    }
  },
});

/* How far each pair (i, i + D/2) of the features of a head turns, by the angle position * theta^(-2i/D):
 * its cosine and sine, (T, D/2) each. */
lm.rotation = function (positions, D, theta) {
  const pairs = Array.from({ length: D / 2 }, (_, i) => theta ** ((-2 * i) / D));
  const angles = positions.flatMap((position) => pairs.map((pace) => position * pace));
  return { cos: Float64Array.from(angles, Math.cos), sin: Float64Array.from(angles, Math.sin) };
};

/* Turn the pairs of each head of x (T, heads * D). */
lm.applyRope = function (x, D, { cos, sin }) {
  const half = D / 2;
  const width = (x.length * half) / cos.length;
  const y = new Float32Array(x.length);
  for (let from = 0; from < x.length; from += D) {
    const turn = Math.floor(from / width) * half;
    for (let i = 0; i < half; i++) {
      const a = x[from + i], b = x[from + half + i];
      y[from + i] = a * cos[turn + i] - b * sin[turn + i];
      y[from + half + i] = b * cos[turn + i] + a * sin[turn + i];
    }
  }
  return y;
};
