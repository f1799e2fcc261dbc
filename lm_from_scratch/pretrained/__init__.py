"""Models that ship with the package, and how they were made.

``gpt2-docs`` and ``qwen2-docs`` are folders that
:func:`~lm_from_scratch.checkpoint.weights.load_shipped` reads; ``record.json`` in each says how the
model was made and how good it is. ``tasks`` answers questions that a program can check, and
``exact_match`` counts how many it answers rightly. ``worlds`` tells stories of a small world, and
``coherence`` counts how often it contradicts itself. ``make`` turns a finished run into such a
folder, and ``readme`` writes the record for people. Change nothing in them by hand: train again,
and run ``make``.
"""
