"""What a pattern of the mask function allows is what Transformers' own dense masks allow."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from transformers import masking_utils as theirs  # noqa: E402

from spattn.patterns import Causal, Documents, KeyPadding, PerBatch, QueriesAt, Sinks, SlidingWindow  # noqa: E402
from spattn.transformers._functions import known_pattern, packed_positions  # noqa: E402
from spattn.transformers._mask import PatternMask, pattern_mask  # noqa: E402

BATCH = 2


def dense(mask):
    """All pairs of a pattern mask; none with the keys behind those that its pattern is for."""
    batch, _, q_len, kv_len = mask.shape
    found = np.zeros((batch, q_len, kv_len), bool)
    for entry in range(batch):
        own = entry if mask.pattern.sizes()[0] != 1 else 0
        found[entry, :, : mask.kv_len] = mask.pattern.index_set(q_len, mask.kv_len, batch=own).to_dense()
    return found


def both(**arguments):
    """The pairs of our mask and those of Transformers'."""
    want = theirs.sdpa_mask(**arguments, allow_is_causal_skip=False, use_vmap=False)
    shape = BATCH, arguments["q_length"], arguments["kv_length"]
    return dense(pattern_mask(**arguments, config=None)), want[:, 0].expand(shape).numpy()


def own_rule(batch, head, query, key):
    """No function of Transformers."""
    return (key - query) % 3 == 1


FUNCTIONS = {
    "causal": lambda size, padding: theirs.causal_mask_function,
    "bidirectional": lambda size, padding: theirs.bidirectional_mask_function,
    "window": lambda size, padding: theirs.sliding_window_causal_mask_function(size),
    "window of both sides": lambda size, padding: theirs.sliding_window_bidirectional_mask_function(size),
    "chunks": theirs.chunked_causal_mask_function,
}


def function(draw, name):
    """A mask function, alone or with what a model adds to it."""
    padding = torch.tensor(draw(st.lists(st.integers(0, 9), min_size=BATCH, max_size=BATCH)))
    made = FUNCTIONS[name](draw(st.integers(1, 6)), padding)
    join = draw(st.sampled_from([None, theirs.and_masks, theirs.or_masks]))
    return made if join is None else join(made, own_rule)


@pytest.mark.parametrize("name", FUNCTIONS)
@given(data=st.data())
def test_pairs_are_those_of_transformers(name, data):
    """For caches that have forgotten tokens, or have room for more, and padding of any kind."""
    draw = data.draw
    q_length, kv_length, kv_offset = draw(st.integers(1, 9)), draw(st.integers(1, 20)), draw(st.integers(0, 8))
    q_offset = kv_offset + draw(st.integers(0, 12))
    seen = draw(st.integers(1, kv_offset + kv_length + 3))
    valid = draw(st.none() | st.lists(st.booleans(), min_size=BATCH * seen, max_size=BATCH * seen))
    got, want = both(
        batch_size=BATCH,
        q_length=q_length,
        kv_length=kv_length,
        q_offset=draw(st.sampled_from([q_offset, torch.tensor(q_offset)])),
        kv_offset=kv_offset,
        mask_function=function(draw, name),
        attention_mask=None if valid is None else torch.tensor(valid).reshape(BATCH, seen),
    )
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("by_position", [False, True])
@pytest.mark.parametrize("name", ["window", "chunks"])
@given(data=st.data())
def test_pairs_of_packed_sequences(name, by_position, data):
    """By positions in each sequence, as Transformers has it since 5.23, or in all of them."""
    lengths = [data.draw(st.permutations([1, 2, 4, 7])) for _ in range(BATCH)]
    positions = torch.stack([torch.cat([torch.arange(n) for n in entry]) for entry in lengths])
    numbers, inner = theirs.find_packed_sequence_indices(positions), function(data.draw, name)
    if by_position and hasattr(theirs, "packed_sequence_compatibility_function"):
        packed = theirs.packed_sequence_compatibility_function(inner, positions, numbers)
    else:
        packed = theirs.and_masks(inner, theirs.packed_sequence_mask_function(numbers))
    got, want = both(batch_size=BATCH, q_length=14, kv_length=14, mask_function=packed)
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize(
    "function, pattern",
    [
        (theirs.causal_mask_function, Causal()),
        (theirs.sliding_window_causal_mask_function(8), SlidingWindow(7, 0)),
        (theirs.sliding_window_bidirectional_mask_function(8), SlidingWindow(8)),
    ],
)
def test_windows_are_known(function, pattern):
    """As patterns of their own, which have plans in closed form."""
    assert known_pattern(function) == pattern
    assert known_pattern(theirs.and_masks(function, own_rule)) is None


@pytest.mark.parametrize("window", [None, 6])
def test_a_step_has_the_pattern_of_the_step_before(window):
    """With a cache that grows, one of a fixed size and one that forgets."""
    function = theirs.causal_mask_function if window is None else theirs.sliding_window_causal_mask_function(window)
    want = Causal() if window is None else SlidingWindow(window - 1, 0)
    for tokens in (1, 5, 20):
        caches = [(tokens, 0), (32, 0)]
        if window is not None:
            caches.append((min(tokens, window), max(tokens - window, 0)))
        for kv_length, kv_offset in caches:
            mask = pattern_mask(
                BATCH, 1, kv_length, tokens - 1, kv_offset, function, torch.ones(BATCH, tokens, dtype=torch.bool)
            )
            assert mask.pattern == want and mask.kv_len == tokens - kv_offset


def test_padding_is_part_of_the_pattern_where_there_is_some():
    valid = torch.tensor([[True, True, False], [True, True, True]])
    mask = pattern_mask(BATCH, 3, 3, attention_mask=valid)
    assert mask.pattern == Causal() & KeyPadding(valid)
    assert pattern_mask(BATCH, 2, 3, attention_mask=valid[:, :2]).kv_len == 2
    assert pattern_mask(BATCH, 3, 3, attention_mask=valid | True).pattern == Causal()


def test_a_step_has_the_pattern_of_the_step_before_with_left_padding_too():
    """Also where a cache has room for more; a sequence without any token has no such pattern."""
    window = theirs.sliding_window_causal_mask_function(4)
    for function, own in ((theirs.causal_mask_function, Causal()), (window, SlidingWindow(3, 0))):
        for tokens, room in ((5, 0), (6, 0), (6, 10)):
            valid = torch.arange(tokens) >= torch.tensor([[3], [0]])
            mask = pattern_mask(BATCH, 1, tokens + room, tokens - 1, 0, function, valid)
            assert mask.pattern == own & PerBatch((~Sinks(3), ~Sinks(0)))
    nothing = torch.zeros(BATCH, 3, dtype=torch.bool)
    assert pattern_mask(BATCH, 1, 3, 2, attention_mask=nothing).pattern == Causal() & KeyPadding(nothing)


def test_queries_elsewhere():
    """Before the last key, with a pattern that looks ahead."""
    mask = pattern_mask(1, 2, 9, 3, mask_function=theirs.sliding_window_bidirectional_mask_function(2))
    assert mask.pattern == QueriesAt(SlidingWindow(2), 3) and mask.kv_len == 9


def test_a_mask_is_handed_on_and_nothing_else():
    mask = pattern_mask(BATCH, 3, 3)
    assert mask.shape == (BATCH, 1, 3, 3) and mask.dtype == torch.bool and "Causal()" in repr(mask)
    assert mask.contiguous() is mask
    for copy in (mask.clone(), mask.detach(), mask.to("meta")):
        assert isinstance(copy, PatternMask) and (copy.pattern, copy.kv_len) == (Causal(), 3)
    assert mask.to("meta").device.type == "meta"
    for use in (lambda: mask[:, :, :2], lambda: mask.float(), lambda: ~mask, lambda: mask.all(), lambda: mask[0]):
        with pytest.raises(TypeError, match=r"^attention_mask: this model computes with its mask"):
            use()


def test_packed_sequences_are_documents():
    numbers = torch.tensor([[0, 0, 0, 1, 1], [0, 1, 1, 1, 1]])
    window = theirs.sliding_window_causal_mask_function(3)
    packed = theirs.and_masks(window, theirs.packed_sequence_mask_function(numbers))
    assert known_pattern(packed) == SlidingWindow(2, 0) & Documents(((3, 2), (1, 4)))
    assert packed_positions(packed).tolist() == [[0, 1, 2, 0, 1], [0, 0, 1, 2, 3]]
    assert packed_positions(window) is None
