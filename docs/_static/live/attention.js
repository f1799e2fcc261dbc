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
  const [H, D] = [n_head, head_dim];
  const [T, S] = [q.length / (H * D), k.length / (n_kv_head * D)];
  const scale = broken.noScale ? 1 : 1 / Math.sqrt(D);
  const y = new q.constructor(T * H * D);
  const weights = Array.from({ length: H }, () => new q.constructor(T * S));
  for (let h = 0; h < H; h++) {
    const kv = Math.floor((h * n_kv_head) / H);
    for (let t = 0; t < T; t++) {
      const seen = broken.noMask ? S : S - T + t + 1; // itself and the tokens before it
      const scores = new Float64Array(seen);
      for (let s = 0; s < seen; s++) {
        let dot = 0;
        const [from, key] = [(t * H + h) * D, (s * n_kv_head + kv) * D];
        for (let d = 0; d < D; d++) dot += q[from + d] * k[key + d];
        scores[s] = dot * scale;
      }
      const row = lm.softmax(scores);
      weights[h].set(row, t * S);
      for (let s = 0; s < seen; s++) {
        const [to, value] = [(t * H + h) * D, (s * n_kv_head + kv) * D];
        for (let d = 0; d < D; d++) y[to + d] += row[s] * v[value + d];
      }
    }
  }
  return { y, weights };
};

/* Turn each pair (i, i + D/2) of the features of each head of x (T, heads * D) by the angle
 * position * theta^(-2i/D). */
lm.applyRope = function (x, D, positions, theta) {
  const heads = x.length / (positions.length * D);
  const y = new Float32Array(x.length);
  positions.forEach((position, t) => {
    for (let i = 0; i < D / 2; i++) {
      const angle = position * theta ** ((-2 * i) / D);
      const [cos, sin] = [Math.cos(angle), Math.sin(angle)];
      for (let h = 0; h < heads; h++) {
        const at = (t * heads + h) * D + i;
        const [a, b] = [x[at], x[at + D / 2]];
        y[at] = a * cos - b * sin;
        y[at + D / 2] = b * cos + a * sin;
      }
    }
  });
  return y;
};
