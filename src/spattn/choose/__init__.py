"""Cost models and the choice of tiles, boxes and kernels, with a record for each machine."""
