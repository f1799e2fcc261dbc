"""Other libraries: their formats and objects, and ours.

Each file knows one library; nothing else in the package needs it.
"""
