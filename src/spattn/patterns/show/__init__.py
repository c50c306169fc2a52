"""Draw and print patterns."""
