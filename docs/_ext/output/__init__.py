"""What a build writes before Sphinx reads, and what it clears away after.

`generated` calls all other rooms, and no room calls it.
"""
