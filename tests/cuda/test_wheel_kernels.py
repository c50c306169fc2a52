"""Common calls on a Hopper GPU run the kernels of the wheel, without nvcc and without a cache."""

import os
import subprocess
import sys

import pytest

from spattn.cuda.driver import cache

PROGRAM = """
import itertools
import torch
import spattn
from spattn import patterns as p

for dtype, dim, n in itertools.product((torch.bfloat16, torch.float16), (64, 128), (100, 1000)):
    q, k, v = (torch.randn(2, 4, n, dim, dtype=dtype, device="cuda", requires_grad=True) for _ in range(3))
    for pattern in (p.Full(), p.Causal(), p.SlidingWindow(70, 0), p.longformer(64, global_tokens=(0, 1))):
        out = spattn.attention(q, k, v, pattern)
        out.float().sum().backward()
        spattn.attention(q[:, :, -1:], k, v, p.Causal())
    print(dtype, dim, n)
"""


@pytest.mark.gpu
@pytest.mark.family("sm90")
@pytest.mark.skipif(not cache.SHIPPED.is_dir(), reason="not a wheel with kernels: tools/add_kernels.sh")
def test_calls_without_nvcc(tmp_path):
    environment = os.environ | {"SPATTN_NVCC": "", "SPATTN_CACHE_DIR": str(tmp_path / "cache")}
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("torch.") == 8
