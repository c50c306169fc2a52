"""What the host knows of selections: their forms, what they refuse, and the patterns that their numbers make."""

from __future__ import annotations

import numpy as np
import pytest

import spattn
from spattn import patterns
from spattn.arrays import namespace_of
from spattn.patterns import dynamic
from spattn.patterns.dynamic import Form

torch = pytest.importorskip("torch")


@pytest.fixture(autouse=True)
def on_a_gpu(monkeypatch):
    """Tensors of integers count as on a GPU: nothing here reads them there."""
    own = type(namespace_of(torch.zeros(1)))
    monkeypatch.setattr(own, "ordinal", lambda self, x: None if x.dtype.is_floating_point else 0)


def dense(pattern, kv_len, batch=0, head=0):
    return pattern.bind(kv_len, kv_len).index_set(kv_len, kv_len, batch=batch, head=head).to_dense()


def test_forms():
    """What of a selection is known without its numbers."""
    blocks, lengths = torch.zeros(2, 3, 4, 5, dtype=torch.int32), torch.tensor([3, 4])
    lines = torch.zeros(3, 6, dtype=torch.int64), torch.zeros(3, 7, dtype=torch.int64)
    found = {
        dynamic.DynamicKeyBlocks(blocks, 16, 1 << 40): Form("blocks", 2, 3, (5,), 4, 16, 2**31 - 1),
        dynamic.DynamicKeyBlocks(blocks[0, 0], 16, 8): Form("blocks", 1, 1, (5,), 4, 16, 8),
        dynamic.DynamicKeyPadding(lengths, left=True): Form("lengths", 2, 1, (1,), left=True),
        dynamic.DynamicDocuments(torch.tensor([0, 3, 9])): Form("documents", 1, 1, (3,)),
        dynamic.DynamicDocuments(torch.tensor([[0, 3, 9], [0, 9, 9]])): Form("documents", 2, 1, (3,)),
        dynamic.DynamicVerticalSlash(*lines): Form("lines", 1, 3, (6, 7)),
    }
    for selection, form in found.items():
        assert selection.form() == form
        for x in selection.arrays():
            assert (1, 1, *x.shape)[-4:-2] in {(form.batch, form.heads), (1, 1)} and x.shape[-2] == form.rows
    assert (
        repr(dynamic.DynamicKeyBlocks(blocks, 16, 8))
        == "DynamicKeyBlocks(blocks=<int32 (2, 3, 4, 5)>, block_q=16, block_kv=8)"
    )


def test_patterns_of_the_numbers():
    """Those that do not exist stand for none, and lengths are cut."""
    blocks = dynamic.DynamicKeyBlocks(torch.tensor([[0, 9], [-7, 1]]), 8, 4)
    assert blocks.to_host(16) == patterns.KeyBlocks(np.array([[0, -1], [-1, 1]]), 8, 4)
    padding = dynamic.DynamicKeyPadding(torch.tensor([-3, 5, 99]), left=True)
    assert padding.to_host(8) == patterns.KeyPadding.from_lengths([0, 5, 8], 8, left=True)
    documents = dynamic.DynamicDocuments(torch.tensor([[0, 3, 3, 6], [0, 8, 8, 8]]))
    assert documents.to_host(8) == patterns.PerBatch((patterns.Documents((3, 3)), patterns.Documents((8,))))
    assert dynamic.DynamicDocuments(torch.tensor([0, 3, 3, 6])).to_host(8) == patterns.Documents((3, 3))
    lines = dynamic.DynamicVerticalSlash(torch.tensor([[-1, 2], [3, 99]]), torch.tensor([[0, 0], [1, 8]]))
    for head, own in enumerate([patterns.VerticalSlash((2,), (0,)), patterns.VerticalSlash((3,), (1,))]):
        assert (dense(lines.to_host(8), 8, head=head) == dense(own, 8)).all()


def test_with_a_pattern():
    """Either way round, and with further patterns; nothing else joins a selection."""
    causal, local, padding = patterns.Causal(), patterns.BlockLocal(3), dynamic.DynamicKeyPadding(torch.tensor([5]))
    for chosen in (causal & padding, padding & causal):
        assert chosen.pattern == causal and chosen.selection is padding
        assert chosen.to_host(8) == causal & padding.to_host(8)
    for chosen in (local & (causal & padding), (causal & padding) & local):
        assert (dense(chosen.to_host(8), 8) == dense(causal & local & padding.to_host(8), 8)).all()
    for other in (lambda: padding & padding, lambda: padding | causal, lambda: padding & "causal", lambda: ~padding):
        with pytest.raises(TypeError, match="a dynamic mask supports & with a pattern only|unsupported operand"):
            other()
    with pytest.raises(TypeError, match="pattern: expected a Pattern, got str"):
        dynamic.MaskedPattern("causal", padding)
    with pytest.raises(TypeError, match="selection: expected a DynamicMask, got Causal"):
        dynamic.MaskedPattern(causal, causal)


def test_copies():
    """What a gradient is computed of: nobody changes it."""
    padding = dynamic.DynamicKeyPadding(torch.tensor([5]), left=True)
    copied = padding.copied()
    padding.lengths.fill_(1)
    assert copied.lengths.item() == 5 and copied.left


def test_what_is_refused():
    whole = torch.zeros(4, 2, dtype=torch.int64)
    for make, error, message in [
        (
            lambda: dynamic.DynamicKeyBlocks(whole.float(), 8, 8),
            TypeError,
            "blocks: expected an array on a GPU, got one in",
        ),
        (lambda: dynamic.DynamicKeyBlocks(whole.bool(), 8, 8), TypeError, "blocks: expected int32 or int64, got bool"),
        (
            lambda: dynamic.DynamicKeyBlocks(whole[0], 8, 8),
            ValueError,
            r"blocks: expected 2-D or 3-D or 4-D, got shape \(2,",
        ),
        (lambda: dynamic.DynamicKeyBlocks(whole, 0, 8), ValueError, "block_q: expected"),
        (lambda: dynamic.DynamicKeyPadding(whole), ValueError, "lengths: expected 1-D"),
        (lambda: dynamic.DynamicKeyPadding(whole[0], left=1), TypeError, "left: expected a bool, got int"),
        (
            lambda: dynamic.DynamicDocuments(whole[:0, 0]),
            ValueError,
            "cu_seqlens: expected at least one number, got none",
        ),
        (
            lambda: dynamic.DynamicVerticalSlash(whole, whole[0]),
            ValueError,
            "diagonals: expected the leading axes of columns",
        ),
        (
            lambda: dynamic.DynamicKeyBlocks(whole, 8, 8).check(33),
            ValueError,
            r"expected 5 query blocks \(33 tokens of 8\), got 4",
        ),
    ]:
        with pytest.raises(error, match=message):
            make()


def test_other_backends():
    """They say which one it takes, and what makes a pattern."""
    q = torch.randn(1, 2, 8, 16)
    for backend in ("auto", "cpu", "reference"):
        with pytest.raises(
            ValueError,
            match=r"requires backend 'cuda', got '(cpu|reference)'; use \.to_host",
        ):
            spattn.attention(q, q, q, dynamic.DynamicKeyPadding(torch.tensor([5])), backend=backend)
    with pytest.raises(TypeError, match="pattern: expected a Pattern.*got DynamicKeyPadding"):
        spattn.attention_backward(q, q, q, q, q, torch.zeros(1, 2, 8), dynamic.DynamicKeyPadding(torch.tensor([5])))
    with pytest.raises(TypeError, match="pattern: expected a Pattern, .*got MaskedPattern"):
        spattn.plan(patterns.Causal() & dynamic.DynamicKeyPadding(torch.tensor([5])), 8)
