"""A sentence encoder (MiniLM) on real text, every attention layer computed by spattn.

``python examples/sentence_encoder`` runs it, ``make demo`` builds the package first.
"""
