"""Key-value caches: what attention keeps of the tokens it has already seen.

Keys and values of earlier tokens never change in a causal model, so generation computes them once.
A cache is an argument of the model's forward. It holds the keys and values of every layer, and the
position of every key, so that padding stays hidden for ever.

:class:`NoCache`
    keeps nothing. Training passes :data:`NO_CACHE`, so no layer asks whether there is a cache.
:class:`GrowingCache`
    keeps everything that is fed, in buffers that double.
:class:`StaticCache`
    keeps a fixed number of positions, in tensors whose shapes never change.
:class:`SlidingCache`
    keeps the last W positions, in a ring.
:class:`LayeredCache`
    gives some layers one of these and others another; :func:`cache_for` chooses.
:class:`PagedCache`
    keeps blocks of a pool, shared by rows that begin alike.

Growing, static and sliding caches take a codec: :class:`Quantized` keeps 8 or 4 bits a number.

Three functions give a cache another form, and three take it back: :func:`to_legacy` and
:func:`from_legacy` plain tensors, :func:`to_transformers` and :func:`from_transformers` the caches
of that library, :func:`save_cache` and :func:`load_cache` a file.

Layout everywhere: keys and values are (B, Hkv, S, D), in and out. All kinds obey one law: a full
forward pass equals any division of it into passes through the cache.
"""

from lm_from_scratch.cache.codec import EXACT, Codec, Exact, Quantized
from lm_from_scratch.cache.convert import (
    from_legacy,
    from_transformers,
    load_cache,
    save_cache,
    to_legacy,
    to_transformers,
)
from lm_from_scratch.cache.growing import GrowingCache
from lm_from_scratch.cache.interface import (
    NO_CACHE,
    Cache,
    KVCache,
    Layer,
    NoCache,
    Restricted,
    check_documents,
    check_positions,
    place,
)
from lm_from_scratch.cache.layered import LayeredCache, cache_for
from lm_from_scratch.cache.paged import BlockPool, PagedCache, Row
from lm_from_scratch.cache.slots import SlidingCache, StaticCache

__all__ = [
    "EXACT",
    "NO_CACHE",
    "BlockPool",
    "Cache",
    "Codec",
    "Exact",
    "GrowingCache",
    "KVCache",
    "Layer",
    "LayeredCache",
    "NoCache",
    "PagedCache",
    "Quantized",
    "Restricted",
    "Row",
    "SlidingCache",
    "StaticCache",
    "cache_for",
    "check_documents",
    "check_positions",
    "from_legacy",
    "from_transformers",
    "load_cache",
    "place",
    "save_cache",
    "to_legacy",
    "to_transformers",
]
