"""The lessons as EPUB and PDF."""
