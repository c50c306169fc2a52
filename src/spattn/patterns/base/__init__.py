"""The Pattern class, composition, registry and serialization."""
