"""The library of score functions: one module per function, which ``spattn.score`` finds by its file."""
