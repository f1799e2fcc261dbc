"""Instruments: what measures, compares, records and draws. No model needs any of them.

``conformance`` runs every kind of attention against an oracle; ``references`` shows who still holds
a parameter after a conversion; ``record`` keeps what a layer computed; ``roofline`` and ``onednn``
are about speed; ``plot`` draws what several pages show. No file here needs another: read the one
that a page uses, and put a new instrument into a file of its own.
"""
