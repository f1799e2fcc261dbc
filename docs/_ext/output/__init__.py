"""What a build writes before Sphinx reads, and what it clears away after.

`generated.py` imports the other folders of `_ext` that compute pages; none of them imports it.
"""
