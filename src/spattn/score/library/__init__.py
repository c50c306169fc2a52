"""The library of score functions: one module per function, which ``spattn.score`` finds by its file.

What a function records may depend on its attributes, on the shapes and dtypes of arrays among them, and on the sizes
of the call, but on nothing else: :mod:`spattn.score.kept_traces` keeps its trace.
"""
