"""Drawings: how things work, as pages and books show it. No model needs any of them.

``canvas`` is the sheet, with ``colours`` and ``labels``; every other file holds what one chapter
draws, a function for each drawing. It is given numbers and words, computes nothing that a page
teaches, and returns a ``Drawing`` with a text for readers who do not see it. Begin with ``gpt2``,
and put a new drawing into the file of its chapter.
"""
