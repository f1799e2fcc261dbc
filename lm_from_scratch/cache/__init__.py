"""Key-value caches: what attention keeps of the tokens it has already seen.

Keys and values of earlier tokens never change in a causal model, so generation computes them once.
A cache is an argument of the model's forward. It holds the keys and values of every layer, and the
position of every key, so that padding stays hidden.

Read in this order:

``interface``
    what a cache is to a model, and ``NoCache``, which keeps nothing: what training passes.
``kv``
    ``KVCache``: a pass from its plan to its end, and what can be done between two passes.
``buffer``
    ``BufferCache``: slots, the position of what is in each, and a track for each window.
``growing``
    ``CatCache`` is the idea in ten lines; ``GrowingCache`` keeps everything that is fed, in buffers
    that double.
``slots``
    ``StaticCache`` keeps a fixed number of positions, in tensors whose shapes never change;
    ``SlidingCache`` the last W positions, in a ring. ``cache_for`` chooses for a model.
``streaming``
    ``StreamingCache`` keeps the first tokens and the last W: less than a model was trained to see.
``codec``
    how buffers keep numbers: exactly, or ``Quantized`` to 8 or 4 bits.
``compressed``
    what a layer keeps that pools older tokens: entries, and the tokens that wait for their block.
``paged``
    ``PagedCache`` keeps blocks of a pool, shared by rows that begin alike.
``restricted``
    ``Restricted``: another cache, seen through one more mask.

A new place for a key is a ``Track``, with a plan of its own; a new memory is a ``KVCache``. Models
know ``interface`` alone: what changes there changes all of them. :mod:`lm_from_scratch.interop`
takes caches to other libraries and to files.

A recurrent layer has a *state* of fixed size in place of keys, and a layer that pools has one
beside them; every kind of cache carries it, in ``kv``.

Layout everywhere: keys and values are (B, Hkv, S, D), in and out. All kinds obey one law: a full
forward pass equals any division of it into passes through the cache.
"""
