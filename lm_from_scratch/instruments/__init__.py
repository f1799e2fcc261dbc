"""Instruments: what measures, compares, records and draws. No model needs any of them.

``conformance`` and ``references`` compare with an oracle; ``record`` keeps what a layer computed;
``roofline``, ``timing`` and ``onednn`` are about speed; ``plot`` draws. Each file stands alone.
"""
