"""The layers of a block that are not attention: norms, activations and the rotary embedding.

Each file stands alone: ``norm``, ``activation``, ``rope``, and ``rope_scaling`` for longer
contexts. A formula is a function, and the module beside it holds its parameters. A new norm or
activation goes into the file of its kind; the models choose it by name.
"""
