"""Layers: what a block is made of beside attention. Each file is one layer and its formula.

Read in any order; :mod:`~lm_from_scratch.layers.rope_scaling` is for texts longer than a model was
trained on, and may wait. A new scaling is a class there with a method ``frequencies``.
"""
