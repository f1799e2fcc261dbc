/* Training GPT-2: one step after another, as in `train` of the lesson on training, with the step of
 * optim/adamw.py. Weights and slopes are float64. */
"use strict";

/* The characters of a text as tokens, the frequent ones first. Of more than 256, the rarest become one. */
lm.Characters = class {
  constructor(text) {
    const counts = new Map();
    for (const letter of text) counts.set(letter, (counts.get(letter) ?? 0) + 1);
    const all = [...counts.keys()].sort((a, b) => counts.get(b) - counts.get(a));
    this.letters = all.length > 256 ? [...all.slice(0, 255), "\ufffd"] : all;
    this.ids = new Map(this.letters.map((letter, id) => [letter, id]));
  }

  encode(text) {
    return Array.from(text, (letter) => this.ids.get(letter) ?? this.letters.length - 1);
  }

  decode(ids) {
    return ids.map((id) => this.letters[id]).join("");
  }
};

/* A new model, as init_weights of models/gpt2.py makes it: normal numbers, but biases 0 and weights of
 * LayerNorm 1; maps whose result is added to x start smaller. */
lm.newGPT2 = function (config, random) {
  const { n_layer, n_embd: C, vocab_size, n_positions, initializer_range } = config;
  const tensors = {};
  const tensor = (name, shape, number) => {
    const data = Float64Array.from({ length: shape.reduce((a, b) => a * b) }, number);
    tensors[name] = { shape, data };
  };
  const matrix = (name, shape, std = initializer_range) => tensor(`${name}.weight`, shape, () => std * lm.normal(random));
  const map = (name, I, O, std) => {
    matrix(name, [I, O], std);
    tensor(`${name}.bias`, [O], () => 0);
  };
  const norm = (name) => {
    tensor(`${name}.weight`, [C], () => 1);
    tensor(`${name}.bias`, [C], () => 0);
  };
  const smaller = initializer_range / Math.sqrt(2 * n_layer);
  matrix("wte", [vocab_size, C]);
  matrix("wpe", [n_positions, C]);
  for (let layer = 0; layer < n_layer; layer++) {
    norm(`h.${layer}.ln_1`);
    map(`h.${layer}.attn.c_attn`, C, 3 * C);
    map(`h.${layer}.attn.c_proj`, C, C, smaller);
    norm(`h.${layer}.ln_2`);
    map(`h.${layer}.mlp.c_fc`, C, 4 * C);
    map(`h.${layer}.mlp.c_proj`, 4 * C, C, smaller);
  }
  norm("ln_f");
  return new lm.GPT2LMHeadModel(config, tensors);
};

/* A number from N(0, 1), of two from [0, 1): Box and Muller, 1958. */
lm.normal = (random) => Math.sqrt(-2 * Math.log(1 - random())) * Math.cos(2 * Math.PI * random());

/* Through the model and back with a row of tokens `ids` (T) whose next ones are `targets` (T): `share`
 * times its loss, whose slopes are added to the `grad` of every weight. */
lm.forwardAndBackward = function (model, ids, targets, share = 1) {
  const { tensors } = model;
  const { n_layer, eps } = model.config;
  const { backward } = lm;
  const positions = ids.map((_, t) => t);
  let x = lm.add(lm.embedding(ids, tensors["wte.weight"]), lm.embedding(positions, tensors["wpe.weight"])); // (T, C)
  const blocks = [];
  for (let layer = 0; layer < n_layer; layer++) {
    blocks.push(forwardBlock(model, x, layer));
    x = blocks.at(-1).y;
  }
  const norm = [tensors["ln_f.weight"], tensors["ln_f.bias"], eps];
  const h = lm.layerNorm(x, ...norm);
  const { loss, dlogits } = lm.crossEntropy(lm.linear(h, model.headWeight), targets, share);

  const dh = backward.linear(dlogits, h, model.headWeight);
  let dx = backward.layerNorm(dh, x, ...norm);
  for (const block of blocks.reverse()) dx = block.backward(dx);
  backward.embedding(dx, ids, tensors["wte.weight"]);
  backward.embedding(dx, positions, tensors["wpe.weight"]);
  return loss;
};

/* One block: its output y (T, C), and the function that leads from dy to dx. */
function forwardBlock(model, x, layer) {
  const { config } = model;
  const C = config.n_embd;
  const of = (name) => ["weight", "bias"].map((kind) => model.tensors[`h.${layer}.${name}.${kind}`]);
  const h = lm.layerNorm(x, ...of("ln_1"), config.eps);
  const qkv = lm.linear(h, ...of("attn.c_attn")); // (T, 3 C)
  const [q, k, v] = [0, 1, 2].map((part) => columns(qkv, 3 * C, part * C, C)); // (T, C) each
  const { y: heads, weights } = lm.attention(q, k, v, config);
  const attended = lm.add(x, lm.linear(heads, ...of("attn.c_proj")));
  const m = lm.layerNorm(attended, ...of("ln_2"), config.eps);
  const inside = lm.linear(m, ...of("mlp.c_fc")); // (T, 4 C)
  const active = lm.geluNew(inside);
  const y = lm.add(attended, lm.linear(active, ...of("mlp.c_proj")));

  // From the last line above to the first. Where a vector goes two ways, two slopes meet.
  function back(dy) {
    const { backward } = lm;
    const dactive = backward.linear(dy, active, ...of("mlp.c_proj"));
    const dinside = backward.geluNew(dactive, inside);
    const dm = backward.linear(dinside, m, ...of("mlp.c_fc"));
    const dattended = lm.add(dy, backward.layerNorm(dm, attended, ...of("ln_2"), config.eps));
    const dheads = backward.linear(dattended, heads, ...of("attn.c_proj"));
    const dqkv = besideEachOther(backward.attention(dheads, q, k, v, weights, config), C);
    const dh = backward.linear(dqkv, h, ...of("attn.c_attn"));
    return lm.add(dattended, backward.layerNorm(dh, x, ...of("ln_1"), config.eps));
  }
  return { y, backward: back };
}

/* Arrays (T, C) as the columns of one, (T, parts * C). */
function besideEachOther(parts, C) {
  const width = parts.length * C;
  const y = new parts[0].constructor(parts.length * parts[0].length);
  parts.forEach((part, p) => {
    for (let t = 0; t * C < part.length; t++) y.set(part.subarray(t * C, (t + 1) * C), t * width + p * C);
  });
  return y;
}

/* Moves all weights a step against their slopes: AdamW, with torch's defaults but the second beta. */
lm.AdamW = class {
  constructor(tensors, { betas = [0.9, 0.95], eps = 1e-8, weight_decay = 0.01 } = {}) {
    Object.assign(this, { tensors, betas, eps, weight_decay, t: 0 });
    for (const tensor of tensors) {
      tensor.grad = new Float64Array(tensor.data.length);
      tensor.mean = new Float64Array(tensor.data.length); // of the slopes
      tensor.square = new Float64Array(tensor.data.length); // of their squares
    }
  }

  zeroGrad() {
    for (const { grad } of this.tensors) grad.fill(0);
  }

  /* The length of the vector of all slopes. If it is above `most`, all become shorter by one factor. */
  clip(most) {
    let sum = 0;
    for (const { grad } of this.tensors) for (let i = 0; i < grad.length; i++) sum += grad[i] * grad[i];
    const norm = Math.sqrt(sum);
    const factor = Math.min(1, most / (norm + 1e-6));
    for (const { grad } of this.tensors) for (let i = 0; i < grad.length; i++) grad[i] *= factor;
    return norm;
  }

  step(lr) {
    this.t++;
    const [beta1, beta2] = this.betas;
    const [correct1, correct2] = [1 - beta1 ** this.t, 1 - beta2 ** this.t];
    for (const { data, grad, mean, square } of this.tensors) {
      for (let i = 0; i < data.length; i++) {
        mean[i] = beta1 * mean[i] + (1 - beta1) * grad[i];
        square[i] = beta2 * square[i] + (1 - beta2) * grad[i] * grad[i];
        const direction = mean[i] / correct1 / (Math.sqrt(square[i] / correct2) + this.eps);
        data[i] -= lr * (this.weight_decay * data[i] + direction);
      }
    }
  }
};

/* A run: a model, the text that it learns, and the loss of each step so far. What takes long is a
 * generator: where it yields, a page can do something else. */
lm.Run = class {
  constructor(config, text, { seed = 0, rows = 8, warmup = 20, longest = 1 } = {}) {
    this.tokenizer = new lm.Characters(text);
    this.stream = this.tokenizer.encode(text);
    this.random = lm.randomFrom(seed);
    this.model = lm.newGPT2({ ...config, vocab_size: this.tokenizer.letters.length }, this.random);
    this.optimizer = new lm.AdamW(Object.values(this.model.tensors));
    Object.assign(this, { seed, rows, warmup, longest, losses: [] });
  }

  /* A row of tokens from a random place of the text, and the one after each. */
  row() {
    const T = this.model.config.block_size;
    const start = Math.floor(this.random() * (this.stream.length - T));
    return [this.stream.slice(start, start + T), this.stream.slice(start + 1, start + T + 1)];
  }

  /* One step, on the mean loss of its rows. The learning rate rises in the first steps, and the vector
   * of all slopes is at most `longest`. */
  *step(lr) {
    this.optimizer.zeroGrad();
    let loss = 0;
    for (let n = 0; n < this.rows; n++) {
      loss += lm.forwardAndBackward(this.model, ...this.row(), 1 / this.rows);
      yield;
    }
    this.optimizer.clip(this.longest);
    this.optimizer.step(lr * Math.min(1, (this.losses.length + 1) / this.warmup));
    this.losses.push(loss);
  }

  /* What the model writes after this step: `count` characters that follow a line end, if its text has any. */
  *write(count, temperature = 0.8) {
    const { block_size } = this.model.config;
    const random = lm.randomFrom(this.seed + this.losses.length);
    const session = new lm.Session(this.model);
    const ids = [this.tokenizer.ids.get("\n") ?? this.stream[0]];
    while (ids.length <= count) {
      // the last ones, in blocks, so that most of them are read already
      const gone = Math.ceil(Math.max(0, ids.length - block_size) / (block_size / 2)) * (block_size / 2);
      const logits = session.logits(ids.slice(gone));
      ids.push(lm.draw(lm.sampled(logits, { temperature }), random()));
      yield;
    }
    return this.tokenizer.decode(ids.slice(1));
  }
};
