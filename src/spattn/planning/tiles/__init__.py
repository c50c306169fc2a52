"""Find the tiles of a bound pattern on affine views."""
