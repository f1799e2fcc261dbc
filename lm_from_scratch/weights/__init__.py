"""Weights that are still tensors, but not plain numbers: put into a built model, and out again.

Read ``swap`` (how one tensor takes the place of another), then ``quantized_weight`` (codes that
torch takes for a matrix; ``int8`` and ``int4`` are its two kinds, ``packed_int8`` multiplies in 8
bits) and ``quantize`` (a model of them), then ``lora`` (small matrices that train beside frozen
ones). ``float4`` has the four-bit floats that others publish, ``resize`` gives a model another
number of tokens. Another format is a subclass of ``QuantizedWeight``; no model file changes.
"""
