"""From text to the batches that a model trains on.

Read ``tokenizer`` first, then ``corpora`` (where text comes from and how it is split), then
``batches`` (how tokens become rows). A new source of text belongs into ``corpora``; another way to
cut rows into ``batches``. Nothing here knows a model.
"""
