/* Qwen2, as in models/qwen2.py: RMSNorm, rotated positions, shared keys and values, a gated MLP. */
"use strict";

lm.Qwen2ForCausalLM = class {
  constructor(config, tensors) {
    this.config = {
      n_layer: config.num_hidden_layers,
      n_head: config.num_attention_heads,
      n_kv_head: config.num_key_value_heads,
      head_dim: config.head_dim,
      n_embd: config.hidden_size,
      vocab_size: config.vocab_size,
      block_size: config.max_position_embeddings,
      eps: config.rms_norm_eps,
      theta: config.rope_theta,
    };
    this.tensors = {};
    for (const [name, tensor] of Object.entries(tensors)) {
      this.tensors[name.replace(/^model\./, "")] = tensor;
    }
    this.broken = {};
    this.silent = new Set();
  }

  get headWeight() {
    return this.tensors["embed_tokens.weight"];
  }

  cache() {
    const { n_layer, block_size, n_kv_head, head_dim } = this.config;
    return new lm.KVCache(n_layer, block_size, n_kv_head * head_dim);
  }

  /* As that of GPT-2. */
  forward(ids, { cache = this.cache(), all = false, shift = 0, watch = () => {} } = {}) {
    const { n_layer, head_dim, theta } = this.config;
    cache.check(ids.length);
    let x = lm.embedding(ids, this.headWeight); // (T, C)
    watch("x", -1, x);
    const positions = ids.map((_, t) => cache.length + t + shift);
    const rotation = lm.rotation(positions, head_dim, theta);
    for (let layer = 0; layer < n_layer; layer++) {
      x = this.block(x, layer, rotation, cache, watch);
      watch("x", layer, x);
    }
    cache.length += ids.length;
    return this.logits(all ? x : x.subarray(-this.config.n_embd));
  }

  block(x, layer, rotation, cache, watch) {
    const of = (name) => this.tensors[`layers.${layer}.${name}`];
    const { eps } = this.config;
    const h = lm.rmsNorm(x, of("input_layernorm.weight"), eps);
    x = lm.add(x, this.attend(h, layer, rotation, cache, of, watch));
    watch("attended", layer, x);
    const m = lm.rmsNorm(x, of("post_attention_layernorm.weight"), eps);
    const gate = lm.linear(m, of("mlp.gate_proj.weight")); // (T, F)
    const up = lm.linear(m, of("mlp.up_proj.weight"));
    return lm.add(x, lm.linear(lm.swiglu(gate, up), of("mlp.down_proj.weight")));
  }

  attend(x, layer, rotation, cache, of, watch) {
    const { head_dim } = this.config;
    const part = (name) =>
      lm.linear(x, of(`self_attn.${name}_proj.weight`), of(`self_attn.${name}_proj.bias`));
    const turn = (part) =>
      this.broken.noPositions ? part : lm.applyRope(part, head_dim, rotation);
    const q = turn(part("q")); // (T, H * D)
    const all = cache.update(layer, turn(part("k")), part("v")); // (S, Hkv * D) each
    const { y, weights } = lm.attention(q, ...all, this.config, this.broken);
    watch("attention", layer, weights);
    lm.silence(y, layer, this.silent, this.config);
    return lm.linear(y, of("self_attn.o_proj.weight"));
  }

  logits(x) {
    return lm.linear(lm.rmsNorm(x, this.tensors["norm.weight"], this.config.eps), this.headWeight);
  }
};
