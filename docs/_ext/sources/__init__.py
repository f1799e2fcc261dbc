"""What pages are made from: Python files, read and not imported; the templates of `docs/_pages`."""
