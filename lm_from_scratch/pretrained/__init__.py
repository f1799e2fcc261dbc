"""Models that ship with the package, and how they were made."""
