"""A step of training with spattn.attention against the same step with attention as PyTorch writes it out."""

import copy

import pytest

import spattn
from spattn import patterns as p
from spattn.testing import DTYPES, assert_within_bound, dense_mask

torch = pytest.importorskip("torch")
nn = torch.nn

LAYERS, HEADS_Q, HEADS_KV, VOCABULARY = 4, 4, 2, 50
BATCH, LENGTH = 2, 150
ORDERS = 8
PATTERNS = {
    "causal window": p.SlidingWindow(20, 0),
    "Longformer": p.longformer(30, global_tokens=(0, 1, 70)),
    "strided": p.strided(12),
    "documents": p.Causal() & p.Documents(((90, 60), (33, 1, 116))),
    "by head": p.PerHead((p.Causal(), p.DilatedWindow(9, 0, 4))),
}


class Block(nn.Module):
    """Attention and an MLP, each behind a norm; query heads share heads of keys and values."""

    def __init__(self, head_dim):
        super().__init__()
        self.head_dim, features = head_dim, HEADS_Q * head_dim
        self.norms = nn.ModuleList(nn.LayerNorm(features) for _ in range(2))
        self.inner = nn.Linear(features, (HEADS_Q + 2 * HEADS_KV) * head_dim, bias=False)
        self.outer = nn.Linear(features, features)
        self.mlp = nn.Sequential(nn.Linear(features, 2 * features), nn.GELU(), nn.Linear(2 * features, features))

    def forward(self, x, attend):
        heads = self.inner(self.norms[0](x)).unflatten(2, (-1, self.head_dim)).transpose(1, 2)
        out = attend(*heads.split((HEADS_Q, HEADS_KV, HEADS_KV), 1))
        x = x + self.outer(out.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norms[1](x))


class Model(nn.Module):
    def __init__(self, head_dim):
        super().__init__()
        features = HEADS_Q * head_dim
        self.token, self.position = nn.Embedding(VOCABULARY, features), nn.Embedding(LENGTH, features)
        self.blocks = nn.ModuleList(Block(head_dim) for _ in range(LAYERS))
        self.read = nn.Linear(features, VOCABULARY)

    def forward(self, tokens, attend):
        x = self.token(tokens) + self.position.weight
        for block in self.blocks:
            x = block(x, attend)
        return self.read(x)


@pytest.fixture(autouse=True)
def one_thread():
    """Models this small are quicker on one."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def dense(allowed, order):
    """Attention with a mask, every step written out; any order but 0 has its keys and features permuted."""

    def attend(q, k, v):
        generator = torch.Generator().manual_seed(order)
        keys, features = (
            (torch.randperm(n, generator=generator) if order else torch.arange(n)).to(q.device)
            for n in (k.shape[2], q.shape[3])
        )
        k, v = (x[:, :, keys].repeat_interleave(HEADS_Q // HEADS_KV, 1) for x in (k, v))
        logits = q[..., features] @ k[..., features].mT * q.shape[3] ** -0.5
        return logits.masked_fill(~allowed[..., keys], -torch.inf).softmax(3) @ v

    return attend


def step(model, tokens, attend):
    """What one step makes of a model: each token's loss before and after it, each parameter and its gradient."""

    def losses():
        guess = model(tokens[:, :-1], attend).flatten(0, 1)
        return nn.functional.cross_entropy(guess, tokens[:, 1:].flatten(), reduction="none")

    optimizer = torch.optim.SGD(model.parameters(), 0.1, weight_decay=0.01)
    before = losses()
    before.mean().backward()
    optimizer.step()
    with torch.no_grad():
        found = {"losses before": before, "losses after": losses()}
    for name, parameter in model.named_parameters():
        found |= {name: parameter, f"gradient of {name}": parameter.grad}
    return {name: x.detach().double().cpu().numpy() for name, x in found.items()}


def check_step(pattern, dtype, device="cpu", head_dim=16):
    """The step with spattn is as near to one in float64 as steps of attention as PyTorch writes it are in `dtype`."""
    torch.manual_seed(0)
    tokens = torch.randint(VOCABULARY, (BATCH, LENGTH + 1)).to(device)
    start = Model(head_dim).to(device, getattr(torch, dtype))
    allowed = torch.from_numpy(dense_mask(pattern, BATCH, HEADS_Q, LENGTH, LENGTH)).to(device)

    def run(precision, attend):
        return step(copy.deepcopy(start).to(getattr(torch, precision)), tokens, attend)

    exact = run("float64", dense(allowed, 0))
    naive = [run(dtype, dense(allowed, order)) for order in range(ORDERS)]
    found = run(dtype, lambda q, k, v: spattn.attention(q, k, v, pattern))
    assert found["losses after"].mean() < found["losses before"].mean()
    for name, got in found.items():
        assert_within_bound(got, exact[name], [one[name] for one in naive], DTYPES[dtype], name)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", PATTERNS)
def test_equals_dense_attention(name, dtype):
    """In float64, where nothing more exact is at hand, other orders alone say what is natural to lose."""
    check_step(PATTERNS[name], dtype)
