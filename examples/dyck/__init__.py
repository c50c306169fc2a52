"""Dyck-(k, D), brackets of k types nested at most D deep: a network that recognizes them, and one that generates them.

``python examples/dyck`` runs both. Source: Yao, Peng, Papadimitriou, Narasimhan, arXiv:2105.11115.
"""
