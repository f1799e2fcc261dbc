/* GPT-2, as in models/gpt2.py. */
"use strict";

lm.GPT2LMHeadModel = class {
  constructor(config, tensors) {
    this.config = {
      n_layer: config.n_layer,
      n_head: config.n_head,
      n_kv_head: config.n_head,
      head_dim: config.n_embd / config.n_head,
      n_embd: config.n_embd,
      vocab_size: config.vocab_size,
      block_size: config.n_positions,
      eps: config.layer_norm_epsilon,
    };
    // its linear maps are stored as (in, out)
    this.tensors = {};
    for (const [name, tensor] of Object.entries(tensors)) {
      const turned = /\.(c_attn|c_proj|c_fc)\.weight$/.test(name);
      this.tensors[name.replace(/^transformer\./, "")] = turned ? transposed(tensor) : tensor;
    }
    this.broken = {}; // switches: noPositions, noScale, noMask
    this.silent = new Set(); // heads whose output is 0: "layer.head"
  }

  get headWeight() {
    return this.tensors["wte.weight"];
  }

  cache() {
    const { n_layer, block_size, n_embd } = this.config;
    return new lm.KVCache(n_layer, block_size, n_embd, this.headWeight.data.constructor);
  }

  /* The logits (V) of the last of the new tokens `ids` (T), or of all, (T, V), after those in the
   * `cache`. `watch` is told of every stage, and may change it in its place. */
  forward(ids, { cache = this.cache(), all = false, shift = 0, watch = () => {} } = {}) {
    const { n_layer } = this.config;
    cache.check(ids.length);
    let x = lm.embedding(ids, this.tensors["wte.weight"]); // (T, C)
    if (!this.broken.noPositions) {
      const positions = ids.map((_, t) => cache.length + t + shift);
      x = lm.add(x, lm.embedding(positions, this.tensors["wpe.weight"]));
    }
    watch("x", -1, x);
    for (let layer = 0; layer < n_layer; layer++) {
      x = this.block(x, layer, cache, watch);
      watch("x", layer, x);
    }
    cache.length += ids.length;
    return this.logits(all ? x : x.subarray(-this.config.n_embd));
  }

  /* One layer: attention moves information between the tokens of x (T, C), the MLP works on each. */
  block(x, layer, cache, watch) {
    const of = (name) => this.tensors[`h.${layer}.${name}`];
    const { eps } = this.config;
    const h = lm.layerNorm(x, of("ln_1.weight"), of("ln_1.bias"), eps);
    x = lm.add(x, this.attend(h, layer, cache, of, watch));
    watch("attended", layer, x);
    const m = lm.layerNorm(x, of("ln_2.weight"), of("ln_2.bias"), eps);
    const inside = lm.geluNew(lm.linear(m, of("mlp.c_fc.weight"), of("mlp.c_fc.bias")));
    return lm.add(x, lm.linear(inside, of("mlp.c_proj.weight"), of("mlp.c_proj.bias")));
  }

  attend(x, layer, cache, of, watch) {
    const C = this.config.n_embd;
    const qkv = lm.linear(x, of("attn.c_attn.weight"), of("attn.c_attn.bias")); // (T, 3 C)
    const [q, k, v] = [0, 1, 2].map((part) => columns(qkv, 3 * C, part * C, C)); // (T, C) each
    const all = cache.update(layer, k, v); // (S, C) each
    const { y, weights } = lm.attention(q, ...all, this.config, this.broken);
    watch("attention", layer, weights);
    lm.silence(y, layer, this.silent, this.config);
    return lm.linear(y, of("attn.c_proj.weight"), of("attn.c_proj.bias"));
  }

  /* From hidden states x (T, C), before the last norm, to logits (T, V). */
  logits(x) {
    const h = lm.layerNorm(x, this.tensors["ln_f.weight"], this.tensors["ln_f.bias"], this.config.eps);
    return lm.linear(h, this.headWeight);
  }
};

/* (I, O) as (O, I). */
function transposed({ shape: [I, O], data }) {
  const turned = new data.constructor(I * O);
  for (let i = 0; i < I; i++) for (let o = 0; o < O; o++) turned[o * I + i] = data[i * O + o];
  return { shape: [O, I], data: turned };
}

/* `count` columns of x (T, width), from column `first` on. */
function columns(x, width, first, count) {
  const part = new x.constructor((x.length / width) * count);
  for (let t = 0; t * width < x.length; t++) {
    part.set(x.subarray(t * width + first, t * width + first + count), t * count);
  }
  return part;
}

/* Heads of y (T, H * D) that are switched off say nothing. */
lm.silence = function (y, layer, silent, { n_head, head_dim }) {
  for (let h = 0; h < n_head; h++) {
    if (!silent.has(`${layer}.${h}`)) continue;
    for (let from = h * head_dim; from < y.length; from += n_head * head_dim) {
      y.fill(0, from, from + head_dim);
    }
  }
};
