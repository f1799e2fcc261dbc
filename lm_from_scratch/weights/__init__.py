"""Weights that are still tensors, but not plain numbers: put into a built model, and out again.

Read ``swap`` (how one tensor takes the place of another), then ``quantize`` (8 and 4 bits; ``int4``
is the layout of the latter), then ``lora`` (small matrices that train beside frozen ones). Another
format is a subclass of ``QuantizedWeight``; no model file changes.
"""
