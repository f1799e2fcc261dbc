"""Complete architectures, one file each: ``gpt2``, ``qwen2``, and the ``heads`` of classifiers.

Read ``gpt2`` from the top, then ``qwen2`` beside it, which is what changed; ``causal_lm`` says what
the two have in common. A model file holds the architecture alone. Quantised weights, kernels, other
attention and recording are put into a built model from outside.
"""
