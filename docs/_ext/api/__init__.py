"""The pages on the package: its files by room, their docstrings, the families of models."""
