"""What a reader looks up: terms of the glossary where they are used, and the site's own search."""
