"""Attention: who sees whom, and five ways to compute the same mean.

Read ``visibility`` (the one rule behind every mask), ``gqa``, then ``attention`` (the formula) and
``sdpa`` (torch's fused kernel, which the models use). ``online_softmax``, ``flex`` and ``varlen``
are other ways to the same result; ``kinds`` lists them, and ``masks`` reads what other programs
call a mask. ``latent`` makes keys and values of all heads from one short vector, with any of them.
In ``indexer`` a query reads few keys, those that a small learned scorer chooses: another result, at
a lower price. In ``pooling`` several tokens become one key. With ``sinks`` the weights
of a query may sum to less than 1. A new kind is a function with the signature in ``layer`` and a
line in ``kinds``: the conformance matrix then tests it. To change the rule, change ``visibility``
and nothing else.
"""
