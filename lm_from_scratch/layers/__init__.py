"""The layers of a block that are not attention: norms, activations and the rotary embedding.

A file is a layer: ``embedding``, ``layer_norm`` and ``norm`` (RMSNorm), ``activation`` and
``gated_mlp``, ``rope``, ``rope_scaling`` for longer contexts, ``experts``, many MLPs in the place
of one (``hash_routing`` has two more routers), ``hyper_connections``, several residual streams in
the place of one, ``recurrent``, what a layer with a state is (``delta_rule`` and
``short_convolution`` are its parts), and ``head``, from states to logits. A formula is a function,
and the module beside it holds its parameters. A new activation is a line in ``ACTIVATIONS``, and a
config chooses it by name.
"""
