/* Numbers in rows, and the few operations that a language model needs.
 *
 * A tensor of shape (T, C) is an array of T * C numbers, row after row. Shapes stand in comments.
 * JavaScript computes in float64. Weights that are read are stored in float32, those that are trained
 * in float64: what an operation makes is of the kind that it is given.
 */
"use strict";

const lm = {}; // everything that these files define

/* A text in the language of the page, with values in the place of their names: words.js has those of
 * an edition that is not the first. */
lm.t = (text, values = {}) => {
  const own = typeof lmWords === "undefined" ? text : lmWords[text] || text;
  return own.replace(/\{(\w+)\}/g, (_, name) => values[name]);
};

/* The tensors of a .safetensors file: {name: {shape, data}}. Eight bytes give the length of a
 * header in JSON, which says where each tensor lies; the numbers follow. */
lm.readSafetensors = function (buffer) {
  const view = new DataView(buffer);
  const length = Number(view.getBigUint64(0, true));
  const header = JSON.parse(new TextDecoder().decode(new Uint8Array(buffer, 8, length)));
  const tensors = {};
  for (const [name, { dtype, shape, data_offsets }] of Object.entries(header)) {
    if (name === "__metadata__") continue;
    const [begin, end] = data_offsets.map((offset) => 8 + length + offset);
    const bytes = buffer.slice(begin, end);
    if (dtype === "F16") tensors[name] = { shape, data: fromFloat16(new Uint16Array(bytes)) };
    else if (dtype === "F32") tensors[name] = { shape, data: new Float32Array(bytes) };
    else throw new Error(`${name} is ${dtype}: only F16 and F32 are read`);
  }
  return tensors;
};

/* float16: one bit of sign, five of exponent, ten of fraction. */
function fromFloat16(halves) {
  return Float32Array.from(halves, (bits) => {
    const sign = bits >> 15 ? -1 : 1;
    const exponent = (bits >> 10) & 31;
    const fraction = bits & 1023;
    if (exponent === 0) return sign * fraction * 2 ** -24;
    if (exponent === 31) return fraction ? NaN : sign * Infinity;
    return sign * (1 + fraction / 1024) * 2 ** (exponent - 15);
  });
}

/* y = x W^T + b for x (T, I), weight (O, I) and bias (O): (T, O). Matrices that lie in the memory of
 * the kernel (kernel.js) are multiplied there, all others here. */
lm.linear = function (x, weight, bias) {
  const [O, I] = weight.shape;
  const y = new x.constructor((x.length / I) * O);
  const multiply = lm.kernel?.of(weight) ?? lm.multiply;
  multiply(x, weight, y);
  if (bias) for (let j = 0; j < y.length; j += O) for (let o = 0; o < O; o++) y[j + o] += bias.data[o];
  return y;
};

/* y = x W^T. Four sums at a time: a processor need not wait for one addition before it begins the next. */
lm.multiply = function (x, { shape: [O, I], data: w }, y) {
  const fours = I - (I % 4);
  for (let n = 0; n < y.length; n++) {
    const [from, row] = [Math.floor(n / O) * I, (n % O) * I];
    let [a, b, c, d] = [0, 0, 0, 0];
    for (let i = 0; i < fours; i += 4) {
      a += x[from + i] * w[row + i];
      b += x[from + i + 1] * w[row + i + 1];
      c += x[from + i + 2] * w[row + i + 2];
      d += x[from + i + 3] * w[row + i + 3];
    }
    for (let i = fours; i < I; i++) a += x[from + i] * w[row + i];
    y[n] = a + b + c + d;
  }
};

/* The rows of a table (V, C) that ids (T) name: (T, C). */
lm.embedding = function (ids, table) {
  const C = table.shape[1];
  const x = new table.data.constructor(ids.length * C);
  ids.forEach((id, t) => x.set(table.data.subarray(id * C, (id + 1) * C), t * C));
  return x;
};

/* a + b, of one shape. */
lm.add = function (a, b) {
  const y = new a.constructor(a.length);
  for (let i = 0; i < a.length; i++) y[i] = a[i] + b[i];
  return y;
};

/* Each row of x (T, C) gets mean 0 and variance 1, then the learned weight and bias (C). */
lm.layerNorm = function (x, weight, bias, eps) {
  const C = weight.data.length;
  const y = new x.constructor(x.length);
  for (let from = 0; from < x.length; from += C) {
    let mean = 0;
    let variance = 0;
    for (let c = 0; c < C; c++) mean += x[from + c] / C;
    for (let c = 0; c < C; c++) variance += (x[from + c] - mean) ** 2 / C;
    const r = 1 / Math.sqrt(variance + eps);
    for (let c = 0; c < C; c++) {
      y[from + c] = (x[from + c] - mean) * r * weight.data[c] + bias.data[c];
    }
  }
  return y;
};

/* Each row of x (T, C) is divided by the root of its mean square, times the learned weight (C). */
lm.rmsNorm = function (x, weight, eps) {
  const C = weight.data.length;
  const y = new Float32Array(x.length);
  for (let from = 0; from < x.length; from += C) {
    let square = 0;
    for (let c = 0; c < C; c++) square += x[from + c] ** 2 / C;
    const r = 1 / Math.sqrt(square + eps);
    for (let c = 0; c < C; c++) y[from + c] = x[from + c] * r * weight.data[c];
  }
  return y;
};

/* GPT-2's activation, the approximation by a hyperbolic tangent. */
lm.geluNew = (x) =>
  x.map((z) => 0.5 * z * (1 + Math.tanh(Math.sqrt(2 / Math.PI) * (z + 0.044715 * z * z * z))));

/* Qwen2's: how much of `up` the `gate` lets pass, feature by feature. */
lm.swiglu = function (gate, up) {
  const y = new gate.constructor(gate.length);
  for (let i = 0; i < y.length; i++) y[i] = (gate[i] / (1 + Math.exp(-gate[i]))) * up[i];
  return y;
};

/* Scores become weights that sum to 1. */
lm.softmax = function (scores) {
  let [largest, sum] = [-Infinity, 0];
  for (let i = 0; i < scores.length; i++) largest = Math.max(largest, scores[i]);
  const powers = new Float64Array(scores.length);
  for (let i = 0; i < scores.length; i++) sum += powers[i] = Math.exp(scores[i] - largest);
  for (let i = 0; i < scores.length; i++) powers[i] /= sum;
  return powers;
};

/* Weights (O, I) rounded to so many bits: each row has a step of its own, its largest number is the
 * largest code. */
lm.rounded = function (weight, bits) {
  const [O, I] = weight.shape;
  const top = 2 ** (bits - 1) - 1;
  const data = new Float32Array(O * I);
  for (let o = 0; o < O; o++) {
    const row = weight.data.subarray(o * I, (o + 1) * I);
    const largest = row.reduce((a, b) => Math.max(a, Math.abs(b)), 0);
    const step = Math.fround(Math.fround(largest) / top) || 1;
    for (let i = 0; i < I; i++) data[o * I + i] = step * roundHalfEven(Math.fround(row[i] / step));
  }
  return { shape: weight.shape, data };
};

/* To the nearest whole number; one half goes to the even neighbour, as everywhere but here. */
function roundHalfEven(number) {
  const down = Math.floor(number);
  const rest = number - down;
  return rest === 0.5 ? down + (Math.abs(down) % 2) : Math.round(number);
}
