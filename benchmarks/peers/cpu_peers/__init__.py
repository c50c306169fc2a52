"""What peers_cpu.py and sparse_fusion.py share: problems, contenders, timing, memory, roofline, figures."""
