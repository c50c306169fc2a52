"""Choose tiles, boxes and kernels with cost models, one for each machine."""
