"""Instruments: what measures, compares, records and plots. No model needs any of them.

``conformance`` runs every kind of attention against an oracle; ``references`` shows who still holds
a parameter after a conversion; ``record`` keeps what a layer computed; ``storyteller`` asks and
checks a model that tells stories; ``plot`` makes the figures that several pages show. Three are
about speed: ``roofline`` says what bounds it, ``onednn`` sends products to another library, and
``layout`` measures which order of the weights, library and dtype are fastest where it runs. Read
the one that a page uses, and put a new instrument into a file of its own.
"""
