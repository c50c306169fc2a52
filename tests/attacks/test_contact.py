"""Arguments from other libraries, and the errors about them."""

import numpy as np
import pytest

import spattn
from spattn import patterns as p

from .oracle import dense, draw, lower_triangle


@pytest.fixture
def jax_program(program):
    """Runs a program with JAX in a process of its own, as JAX starts threads, which tests that fork must not have."""
    pytest.importorskip("jax")
    return lambda source: program(source, JAX_PLATFORMS="cpu")


# -- DeepSpeed, head_dim, JAX, torch.compile ---------------------------------------------------------------------------


def test_deepspeeds_own_example():
    """The "sparse_attention" example on DeepSpeed's configuration page, and in GPT-NeoX' docstring, is read.

    It lists the keys of all modes. DeepSpeed's reader takes those of the chosen mode and ignores the others.
    """
    config = {"block": 16, "different_layout_per_head": True, "num_local_blocks": 4, "num_global_blocks": 1}
    config |= {"num_different_global_patterns": 4, "num_random_blocks": 0, "local_window_blocks": [4]}
    config |= {"global_block_indices": [0], "global_block_end_indices": None, "num_sliding_window_blocks": 3}
    page = {"mode": "fixed", "attention": "bidirectional", "horizontal_global_attention": False, **config}
    expected = p.deepspeed.fixed(16, 4, 1, "bidirectional", False, 4)
    assert p.interop.from_deepspeed({"sparse_attention": page}) == expected
    assert p.interop.from_deepspeed(config) == expected


@pytest.mark.parametrize("dim, dim_v", [(512, 512), (576, 512), (64, 257)])
def test_head_dim_beyond_256(dim, dim_v):
    """pytorch#191937 (Gemma 4: 512), multi-head latent attention and DeepSeek's sparse attention (576 and 512)."""
    q, k, v = draw(2, (1, 2, 40, dim), (1, 1, 40, dim), (1, 1, 40, dim_v))
    out = spattn.attention(q, k, v, p.SlidingWindow(3, 0))
    distance = np.arange(40)[:, None] - np.arange(40)
    assert np.abs(dense(q, k, v, (distance >= 0) & (distance <= 3)) - out).max() < 1e-5


def test_masks_that_jax_traces(jax_program):
    """keras#21808, jax#25213, jax#37179, marin#6330: masks, lengths or segment ids are data of a jitted program.

    The packing or padding of a batch is an argument of the training step. A pattern that is a constant of the program
    would make another program of each batch.
    """
    source = """
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import spattn.jax

arrays = oracle.draw(3, *[(2, 2, 40, 16)] * 3)
segments = np.repeat([[0, 1]], 20, axis=1).reshape(1, 40).repeat(2, 0)

@jax.jit
def step(q, k, v, ids):
    return spattn.jax.attention(q, k, v, ids[:, None, :, None] == ids[:, None, None, :])

out = step(*map(jnp.asarray, arrays), jnp.asarray(segments))
allowed = segments[:, None, :, None] == segments[:, None, None, :]
print(out.shape, abs(np.asarray(out) - oracle.dense(*arrays, allowed)).max() < 1e-5)
"""
    assert jax_program(source) == "(2, 2, 40, 16) True\n"


def test_compiled_steps_of_changing_documents():
    """pytorch#136196, #141486, attention-gym#76: torch.compile, and a pattern that is new in each step.

    If each packing were compiled again, PyTorch would give up after eight of them and run eagerly, or raise with
    fullgraph.
    """
    torch = pytest.importorskip("torch")
    from torch._dynamo.testing import CompileCounter

    torch._dynamo.reset()
    counter = CompileCounter()
    step = torch.compile(lambda q, k, v, pattern: spattn.attention(q, k, v, pattern) * 2, backend=counter)
    arrays = draw(5, *[(1, 2, 60, 16)] * 3)
    try:
        for lengths in ((20, 40), (20, 40), (30, 30), (10, 50)):
            out = step(*map(torch.from_numpy, arrays), p.Causal() & p.Documents(lengths))
            document = np.repeat([0, 1], lengths)
            allowed = lower_triangle(60) & (document[:, None] == document)
            assert np.abs(out.numpy() - 2 * dense(*arrays, allowed)).max() < 1e-4, lengths
    finally:
        torch._dynamo.reset()
    assert counter.frame_count <= 2


# -- errors ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lengths", [([0, 4, 8], [0, 9, 17]), ([0, 9, 20], None)], ids=["both", "queries"])
def test_error_names_the_lengths_that_were_given(lengths):
    """cu_seqlens of another number of queries: the error names the argument."""
    q, k, v = draw(6, (1, 2, 10, 8), (1, 2, 17, 8), (1, 2, 17, 8))
    with pytest.raises((ValueError, TypeError)) as error:
        spattn.attention(
            q, k, v, p.interop.from_flash_attention(causal=True, cu_seqlens_q=lengths[0], cu_seqlens_k=lengths[1])
        )
    assert "cu_seqlens" in str(error.value)


def block_mask(torch):
    """A BlockMask of FlexAttention, causal."""
    from torch.nn.attention.flex_attention import create_block_mask

    return create_block_mask(lambda b, h, q, k: q >= k, None, None, 6, 6, device="cpu")


def sparse_matrix(torch):
    """A SciPy matrix."""
    return pytest.importorskip("scipy.sparse").eye(6, format="csr")


CAUSAL, EVERY, OWN = np.tri(6, dtype=bool), np.ones((6, 6), bool), np.eye(6, dtype=bool)
HANDED_OVER = {  # made with PyTorch, the mask that it means if it means one, what an error may name
    "BlockMask": (block_mask, CAUSAL, ("from_block_mask",)),
    "mask_mod": (lambda torch: lambda b, h, q, k: q >= k, CAUSAL, ("from_mask_mod",)),
    "SciPy matrix": (sparse_matrix, OWN, ("from_scipy",)),
    "sparse tensor": (lambda torch: torch.eye(6).to_sparse(), OWN, ("from_torch_sparse",)),
    "additive mask": (
        lambda torch: torch.zeros(6, 6).masked_fill(~torch.from_numpy(CAUSAL), -torch.inf),
        CAUSAL,
        ("== 0", "from_additive", "bool()"),
    ),
    "integers": (lambda torch: torch.ones(6, 6, dtype=torch.int64), None, ("bool", "!= 0")),
    "None": (lambda torch: None, EVERY, ("full",)),
}


@pytest.mark.parametrize("kind", HANDED_OVER)
def test_error_knows_what_was_handed_over(kind):
    """The mask of another library computes the right thing, or the error names the function that converts it."""
    torch = pytest.importorskip("torch")
    make, allowed, names = HANDED_OVER[kind]
    arrays = draw(7, *[(1, 2, 6, 8)] * 3)
    plain = "pattern: expected a Pattern, a registered name, a Plan or a bool array, got"
    try:
        out = spattn.attention(*map(torch.from_numpy, arrays), make(torch))
    except (TypeError, ValueError) as error:
        assert not str(error).startswith(plain) and any(name in str(error) for name in names), error
    else:
        assert allowed is not None
        assert np.abs(out.numpy() - dense(*arrays, allowed)).max() < 1e-5


def test_name_of_a_pattern_with_parameters():
    """The name of a pattern that needs parameters is refused in spattn's words, not in Python's about __init__()."""
    q, k, v = draw(8, *[(1, 2, 6, 8)] * 3)
    with pytest.raises((TypeError, ValueError)) as error:
        spattn.attention(q, k, v, "sliding_window")
    assert "__init__()" not in str(error.value)


def test_parameters_in_tensors():
    """Parameters in tensors of a framework are those in a list."""
    torch = pytest.importorskip("torch")
    for pattern in (p.GlobalTokens, p.Documents, lambda x: p.VerticalSlash(x, x)):
        assert pattern(torch.tensor([3, 4])) == pattern([3, 4]) == pattern(np.array([3, 4]))


@pytest.mark.unfollowed
@pytest.mark.usefixtures("slow_plans", "no_plans")
def test_warning_of_a_predicate_that_is_asked_by_cell():
    """The warning for a predicate that is evaluated cell by cell names the caller's mask_mod, its line and a remedy."""
    torch = pytest.importorskip("torch")
    pattern = p.interop.from_mask_mod(lambda b, h, q, k: torch.gcd(q, k) == 1)
    with pytest.warns(spattn.PlanningWarning) as seen:
        spattn.plan(pattern, 512)
    (warning,) = seen
    assert "test_contact.py, line" in str(warning.message) and "_Bound(" not in str(warning.message)
    assert "aten.gcd" in str(warning.message) and "intersect it (&) with" in str(warning.message)
