"""Looking inside a model, and changing what is there.

Read ``sites`` first: where a model's numbers can be read and replaced while it runs. ``probe``
reads something off them with one matrix; ``patching`` puts the numbers of another run in their
place; ``lens`` asks what the model would say if it stopped here; ``dictionary`` takes a state apart
into features; ``league`` scores all of them where the right answer is known, on the small worlds
of :mod:`~lm_from_scratch.text.worlds`.

``sites`` works on any model that the package opens, the others on those with one residual stream.
No model knows of them.
"""
