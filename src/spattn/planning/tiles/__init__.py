"""Tile finders: from a bound pattern to tiles over affine views."""
