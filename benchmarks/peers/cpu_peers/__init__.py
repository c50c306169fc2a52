"""Problems, contenders, memory, roofline and figures of peers_cpu.py and sparse_fusion.py."""
