"""Complete architectures, one a file."""
