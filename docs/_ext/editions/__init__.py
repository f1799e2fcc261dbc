"""The site in other languages: which pages an edition has, its words, a search in Chinese."""
