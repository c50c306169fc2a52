"""The library of score functions: one module per function, which ``spattn.score`` finds by its file.

The trace of a function may depend only on the function's attributes (of arrays, the shape and dtype) and on the sizes
of the call, because :mod:`spattn.score.kept_traces` keeps it.
"""
