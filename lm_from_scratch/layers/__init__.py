"""The layers of a block that are not attention: norms, activations and the rotary embedding.

Each file stands alone: ``embedding``, ``norm``, ``activation``, ``rope``, ``rope_scaling`` for
longer contexts, and ``experts``, many MLPs in the place of one. A formula is a function, and the
module beside it holds its parameters. A new activation is a line in ``ACTIVATIONS``, and a config
chooses it by name; a new norm goes into ``norm``, and the model that uses it imports it.
"""
