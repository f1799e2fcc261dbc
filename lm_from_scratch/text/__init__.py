"""Text on its way to a model: documents, tokens, and batches that say where every token stands.

Read :mod:`~lm_from_scratch.text.targets` and :mod:`~lm_from_scratch.text.batches` first: a model
sees nothing else. Where the text comes from is for :mod:`~lm_from_scratch.text.corpora` alone to
know; a new source is a function there that returns documents.
"""
