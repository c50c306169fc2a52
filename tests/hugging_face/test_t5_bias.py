"""The buckets of ``spattn.score.t5_bias`` are those of transformers."""

import numpy as np
import pytest

from spattn.score import t5_bias

torch = pytest.importorskip("torch")
t5 = pytest.importorskip("transformers.models.t5.modeling_t5")


@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("count, farthest", [(32, 128), (16, 200)])
def test_buckets(bidirectional, count, farthest):
    relative = np.arange(-500, 500)
    buckets = t5.T5Attention._relative_position_bucket(torch.from_numpy(relative), bidirectional, count, farthest)
    function = t5_bias(np.arange(float(count))[:, None], bidirectional=bidirectional, max_distance=farthest)
    assert [function(0.0, 0, 0, 500, 500 + int(d)) for d in relative] == buckets.tolist()
