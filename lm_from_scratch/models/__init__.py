"""Complete architectures, one file each: ``gpt2``, ``qwen2``, and the ``heads`` of classifiers.

Read ``gpt2`` from the top, then ``qwen2`` beside it, which is what changed; each file after it is
Qwen2 with one more change: ``qwen3``, ``qwen3_moe``, ``deepseek_v3``, ``smollm3``, ``qwen3_next``,
``qwen3_5``, ``gemma3``, ``gemma4``, ``gpt_oss``, and ``deepseek_v4`` with most of them at once.
Their layers are in ``gated_attention``, ``gated_delta_net``, ``indexed_attention`` and
``compressor``; ``mtp`` predicts a second token. ``interface`` says what all have in common.
``blocks``, ``modes`` and ``randomize`` are small tools for any built model. A model file holds the
architecture alone: quantised weights, kernels, other attention and recording are put into a built
model from outside. Names of modules are those of published checkpoints, so they stay as they are. A
new architecture is a file here, a line in :mod:`lm_from_scratch.checkpoint.architectures`, and a
row of :mod:`lm_from_scratch.checkpoint.dialects`.
"""
