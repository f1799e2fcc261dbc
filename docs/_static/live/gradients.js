/* The way back: for each operation, from the slope of its output to the slopes of what it was made of.
 *
 * The slope of a number says how much the loss grows when that number grows a little: dy here is short
 * for d loss / d y. Each function takes dy, of the shape of y, and what the operation had been given. It
 * returns dx, of the shape of x. Slopes of weights are added to their `grad`, because a weight that is
 * used twice has two of them: in two rows of a batch, or as a token's vector and in the head.
 *
 * PyTorch does this by itself (training/autograd.py has it for single numbers).
 */
"use strict";

lm.backward = {};

/* y = x W^T + b, for x (T, I), W (O, I), b (O):
 *
 *   dx (T, I) = dy W        dW (O, I) = dy^T x        db (O) = the sum of dy (T, O) over its rows */
lm.backward.linear = function (dy, x, weight, bias) {
  const [O, I] = weight.shape;
  const T = x.length / I;
  const dx = new x.constructor(x.length);
  addProduct(dx, dy, weight.data, [T, O, I], [O, 1]);
  addProduct(weight.grad, dy, x, [O, T, I], [1, O]);
  if (bias) for (let i = 0; i < dy.length; i++) bias.grad[i % O] += dy[i];
  return dx;
};

/* Add a b to y, for a (R, K), b (K, C) and y (R, C). `down` and `right` say how far apart neighbours of a
 * lie, from row to row and inside a row: a transposed matrix is the same array with the two changed.
 *
 * Two rows and four columns at a time: eight sums of products of six numbers, which a processor holds
 * without writing them to memory. The rest, at the edges, is summed one by one. */
function addProduct(y, a, b, [R, K, C], [down, right]) {
  for (let r = 0; r < R; r += 2) {
    for (let c = 0; c < C; c += 4) {
      const at = r * C + c;
      if (r + 1 === R || c + 3 >= C) {
        for (let row = r; row < Math.min(r + 2, R); row++) {
          for (let column = c; column < Math.min(c + 4, C); column++) {
            for (let k = 0; k < K; k++) y[row * C + column] += a[row * down + k * right] * b[k * C + column];
          }
        }
        continue;
      }
      let s0 = 0, s1 = 0, s2 = 0, s3 = 0; // of the upper row
      let t0 = 0, t1 = 0, t2 = 0, t3 = 0; // of the lower one
      for (let k = 0, i = r * down, j = c; k < K; k++, i += right, j += C) {
        const upper = a[i];
        const lower = a[i + down];
        s0 += upper * b[j];
        s1 += upper * b[j + 1];
        s2 += upper * b[j + 2];
        s3 += upper * b[j + 3];
        t0 += lower * b[j];
        t1 += lower * b[j + 1];
        t2 += lower * b[j + 2];
        t3 += lower * b[j + 3];
      }
      y[at] += s0;
      y[at + 1] += s1;
      y[at + 2] += s2;
      y[at + 3] += s3;
      y[at + C] += t0;
      y[at + C + 1] += t1;
      y[at + C + 2] += t2;
      y[at + C + 3] += t3;
    }
  }
}

/* y (T, C) are the rows of a table (V, C) that ids (T) name: the slope of each goes to the row that it
 * was copied from. */
lm.backward.embedding = function (dy, ids, table) {
  const C = table.shape[1];
  ids.forEach((id, t) => {
    for (let c = 0; c < C; c++) table.grad[id * C + c] += dy[t * C + c];
  });
};

/* y = n w + b with n = (x - mean) r and r = 1 / sqrt(variance + eps), row by row of x (T, C):
 *
 *   dn = dy w        dx = r (dn - mean(dn) - n mean(dn n))        dw = sum of dy n        db = sum of dy
 *
 * A step that moves the whole row, or makes it longer, changes nothing: the norm takes it back. */
lm.backward.layerNorm = function (dy, x, weight, bias, eps) {
  const C = weight.data.length;
  const dx = new x.constructor(x.length);
  const n = new x.constructor(C);
  for (let from = 0; from < x.length; from += C) {
    let mean = 0;
    let variance = 0;
    for (let c = 0; c < C; c++) mean += x[from + c] / C;
    for (let c = 0; c < C; c++) variance += (x[from + c] - mean) ** 2 / C;
    const r = 1 / Math.sqrt(variance + eps);
    let [shift, stretch] = [0, 0]; // mean(dn) and mean(dn n)
    for (let c = 0; c < C; c++) {
      n[c] = (x[from + c] - mean) * r;
      weight.grad[c] += dy[from + c] * n[c];
      bias.grad[c] += dy[from + c];
      const dn = dy[from + c] * weight.data[c];
      shift += dn / C;
      stretch += (dn * n[c]) / C;
    }
    for (let c = 0; c < C; c++) {
      dx[from + c] = r * (dy[from + c] * weight.data[c] - shift - n[c] * stretch);
    }
  }
  return dx;
};

/* y = x (1 + tanh u) / 2 with u = sqrt(2 / pi) (x + 0.044715 x^3), number by number:
 *
 *   dx = dy ((1 + tanh u) / 2 + x (1 - tanh^2 u) / 2 * sqrt(2 / pi) (1 + 3 * 0.044715 x^2)) */
lm.backward.geluNew = function (dy, x) {
  const root = Math.sqrt(2 / Math.PI);
  return dy.map((slope, i) => {
    const square = x[i] * x[i];
    const tanh = Math.tanh(root * x[i] * (1 + 0.044715 * square));
    return slope * 0.5 * (1 + tanh + x[i] * (1 - tanh * tanh) * root * (1 + 3 * 0.044715 * square));
  });
};

/* y_t = sum over s <= t of w_ts v_s, with w_t = softmax of the scores q_t k_s / sqrt(D), head by head:
 *
 *   dw_ts = dy_t v_s        dscore_ts = w_ts (dw_ts - sum over s of w_ts dw_ts)
 *   dq_t = sum over s of dscore_ts k_s / sqrt(D)
 *   dk_s = sum over t of dscore_ts q_t / sqrt(D)        dv_s = sum over t of w_ts dy_t
 *
 * q, k, v and dy are (T, H * D), the weights H arrays of (T, T). Returns dq, dk and dv. */
lm.backward.attention = function (dy, q, k, v, weights, { n_head: H, head_dim: D }) {
  const T = q.length / (H * D);
  const scale = 1 / Math.sqrt(D);
  const [dq, dk, dv] = [q, k, v].map((x) => new x.constructor(x.length));
  const dw = new q.constructor(T);
  for (let h = 0; h < H; h++) {
    for (let t = 0; t < T; t++) {
      const to = (t * H + h) * D;
      let mean = 0; // the sum over s of w_ts dw_ts
      for (let s = 0; s <= t; s++) {
        const from = (s * H + h) * D;
        const w = weights[h][t * T + s];
        dw[s] = 0;
        for (let d = 0; d < D; d++) {
          dw[s] += dy[to + d] * v[from + d];
          dv[from + d] += w * dy[to + d];
        }
        mean += w * dw[s];
      }
      for (let s = 0; s <= t; s++) {
        const from = (s * H + h) * D;
        const dscore = weights[h][t * T + s] * (dw[s] - mean) * scale;
        for (let d = 0; d < D; d++) {
          dq[to + d] += dscore * k[from + d];
          dk[from + d] += dscore * q[to + d];
        }
      }
    }
  }
  return [dq, dk, dv];
};

/* loss = share * the mean of -log p(target) over the T rows of logits (T, V), with p = softmax(logits):
 *
 *   dlogits = share / T * (p - 1) at the target, share / T * p elsewhere
 *
 * Here the way back begins: returns the loss and dlogits. */
lm.crossEntropy = function (logits, targets, share = 1) {
  const T = targets.length;
  const V = logits.length / T;
  const dlogits = new logits.constructor(logits.length);
  let loss = 0;
  for (let t = 0; t < T; t++) {
    const row = logits.subarray(t * V, (t + 1) * V);
    let [largest, sum] = [-Infinity, 0];
    for (let i = 0; i < V; i++) largest = Math.max(largest, row[i]);
    for (let i = 0; i < V; i++) sum += Math.exp(row[i] - largest);
    for (let i = 0; i < V; i++) dlogits[t * V + i] = ((share / T) * Math.exp(row[i] - largest)) / sum;
    dlogits[t * V + targets[t]] -= share / T;
    loss += (share / T) * (Math.log(sum) + largest - row[targets[t]]);
  }
  return { loss, dlogits };
};
