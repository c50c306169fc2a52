"""The demo: its NumPy encoder against PyTorch's operators, its texts, and the whole of it on short texts."""

import io
import json
import math
from pathlib import Path

import numpy as np
import pytest

import spattn
from spattn.demo import DemoUnavailable, embeddings, layers, model, naive, text
from spattn.demo.machine import Others
from spattn.demo.progress import Progress

FEATURES, HEADS, LAYERS = 32, 4, 2


@pytest.fixture(scope="module")
def small_encoder():
    """A BERT of random weights, in the checkpoint's names."""
    rng = np.random.default_rng(0)

    def draw(*shape):
        return rng.standard_normal(shape, dtype=np.float32) * np.float32(shape[-1] ** -0.5)

    weights = {
        f"embeddings.{name}_embeddings.weight": draw(rows, FEATURES)
        for name, rows in (("word", 50), ("position", 64), ("token_type", 2))
    }
    norms = ["embeddings.LayerNorm"]
    for layer in range(LAYERS):
        at = f"encoder.layer.{layer}"
        linear = {f"attention.self.{part}": (FEATURES, FEATURES) for part in ("query", "key", "value")}
        linear |= {
            "attention.output.dense": (FEATURES, FEATURES),
            "intermediate.dense": (2 * FEATURES, FEATURES),
            "output.dense": (FEATURES, 2 * FEATURES),
        }
        for name, shape in linear.items():
            weights |= {f"{at}.{name}.weight": draw(*shape), f"{at}.{name}.bias": draw(shape[0])}
        norms += [f"{at}.attention.output.LayerNorm", f"{at}.output.LayerNorm"]
    for name in norms:
        weights |= {f"{name}.weight": 1 + draw(FEATURES), f"{name}.bias": draw(FEATURES)}
    return model.Encoder(weights, HEADS, LAYERS, 1e-12)


@pytest.fixture(scope="module")
def real():
    """The real encoder and tokenizer."""
    try:
        return model.load()
    except DemoUnavailable as error:
        pytest.skip(str(error))


def torch_embedding(encoder, tokens):
    """One text's embedding in PyTorch's own operators, float64."""
    torch = pytest.importorskip("torch")
    f = torch.nn.functional
    w = {k: torch.from_numpy(np.array(v)).double() for k, v in encoder.weights.items() if v.dtype == np.float32}

    def linear(x, name):
        return f.linear(x, w[f"{name}.weight"], w[f"{name}.bias"])

    def norm(x, name):
        return f.layer_norm(x, x.shape[-1:], w[f"{name}.weight"], w[f"{name}.bias"], encoder.eps)

    table = {part: w[f"embeddings.{part}_embeddings.weight"] for part in ("word", "position", "token_type")}
    x = table["word"][torch.from_numpy(tokens)] + table["position"][: len(tokens)] + table["token_type"][0]
    x = norm(x, "embeddings.LayerNorm")
    for layer in range(encoder.layers):
        at = f"encoder.layer.{layer}"
        q, k, v = (
            linear(x, f"{at}.attention.self.{part}").unflatten(-1, (encoder.heads, -1)).transpose(0, 1)
            for part in ("query", "key", "value")
        )
        mixed = f.scaled_dot_product_attention(q, k, v).transpose(0, 1).flatten(1)
        x = norm(x + linear(mixed, f"{at}.attention.output.dense"), f"{at}.attention.output.LayerNorm")
        inner = linear(f.gelu(linear(x, f"{at}.intermediate.dense")), f"{at}.output.dense")
        x = norm(x + inner, f"{at}.output.LayerNorm")
    return f.normalize(x.mean(0), dim=0).numpy()


def test_gelu_is_the_exact_one():
    x = np.linspace(-9, 9, 2001, dtype=np.float32)
    want = [0.5 * value * (1 + math.erf(value / math.sqrt(2))) for value in x.tolist()]
    np.testing.assert_allclose(model.gelu(x), want, rtol=0, atol=1e-6)


@pytest.mark.parametrize("strip_cells", [1, 700, 1 << 20])
def test_naive_attention_is_attention(strip_cells):
    rng = np.random.default_rng(1)
    q, k, v = rng.standard_normal((3, 2, 3, 70, 8), dtype=np.float32)
    want = spattn.attention(*(x.astype(np.float64) for x in (q, k, v)), "full", backend="reference")
    np.testing.assert_allclose(naive.dense_attention(q, k, v, strip_cells), want, rtol=0, atol=1e-5)


def test_encoder_agrees_with_pytorch(small_encoder):
    tokens = np.random.default_rng(2).integers(0, 50, 40)
    got = embeddings.plain_embedding(small_encoder, tokens)
    np.testing.assert_allclose(got, torch_embedding(small_encoder, tokens), rtol=0, atol=1e-5)


def test_real_encoder_agrees_with_pytorch(real):
    encoder, tokenizer = real
    tokens = np.array(tokenizer.encode("Attention is a weighted mean of values.").ids)
    got = embeddings.plain_embedding(encoder, tokens)
    np.testing.assert_allclose(got, torch_embedding(encoder, tokens), rtol=0, atol=1e-5)


def test_padding_and_packing_change_nothing(small_encoder):
    rng = np.random.default_rng(3)
    texts = [rng.integers(0, 50, n) for n in (1, 7, 64, 33)]
    want = np.stack([embeddings.plain_embedding(small_encoder, t) for t in texts])
    padded = embeddings.padded_embeddings(small_encoder, texts, "cpu", spattn.patterns.Full())
    packed = embeddings.packed_embeddings(small_encoder, texts, "cpu")
    np.testing.assert_allclose(padded, want, rtol=0, atol=embeddings.TOLERANCE)
    np.testing.assert_allclose(packed, want, rtol=0, atol=embeddings.TOLERANCE)


def test_disagreement_is_noticed():
    assert embeddings.Agreement(1, 1, 1e-6, 1e-6).holds
    assert not embeddings.Agreement(1, 1, 2e-5, 1e-6).holds
    assert not embeddings.Agreement(1, 1, 1e-6, math.nan).holds


def test_texts_are_an_opening_and_a_function_of_each_module():
    texts = text.sample(6)
    assert [t.kind for t in texts] == ["opening", "function"] * 6
    assert [t.module for t in texts[::2]] == [t.module for t in texts[1::2]] == list(text.MODULES[:6])
    assert all(t.source.lstrip().startswith(("def ", "async def ")) for t in texts[1::2])


def test_chunks_are_consecutive_source(real):
    _, tokenizer = real
    windows = text.chunks(tokenizer, 3, 64)
    assert windows.shape == (3, 64)
    assert {tokenizer.id_to_token(t) for t in windows[:, 0]} == {"[CLS]"}
    first = next(source for _, source in text._sources())
    np.testing.assert_array_equal(
        windows[:, 1:-1].ravel(), tokenizer.encode(first, add_special_tokens=False).ids[: 3 * 62]
    )


def test_progress_only_on_a_terminal():
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    for stream, shown in ((io.StringIO(), False), (Terminal(), True)):
        progress = Progress(stream)
        progress.start("work", 2)
        assert list(progress.each("ab")) == ["a", "b"]
        progress.finish()
        assert ("work" in stream.getvalue()) is shown


@pytest.mark.slow
def test_whole_demo(real, tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    import spattn.demo.report as demo

    monkeypatch.setattr(demo, "QUICK_LENGTHS", [128, 600])
    monkeypatch.setattr(demo, "QUICK_MODULES", 2)
    monkeypatch.setattr("spattn.demo.speed._SECONDS_A_LENGTH", 0)
    lines = []
    assert demo.run(tmp_path / "new", quick=True, say=lines.append)
    report = json.loads((tmp_path / "new" / "demo.json").read_text())
    assert report["agreement"]["holds"]
    assert [d["tokens"] for d in report["dense"]] == [128, 600]
    assert {c["pattern"] for c in report["speed"]} > {"spattn dense", "sliding window ±256"}
    for name in ("speed.png", "embeddings.png", "patterns.png"):
        assert (tmp_path / "new" / name).read_bytes().startswith(b"\x89PNG")
        assert any(name in line for line in lines)


@pytest.mark.slow
def test_profile_in_transformers(real, tmp_path, monkeypatch):
    for package in ("matplotlib", "torch", "transformers"):
        pytest.importorskip(package)
    monkeypatch.setattr(layers, "QUICK_TOKENS", 512)
    monkeypatch.setattr(layers, "ROUNDS", 1)
    lines = []
    assert layers.run(tmp_path / "new", quick=True, say=lines.append)
    report = json.loads((tmp_path / "new" / "layers.json").read_text())
    assert report["difference"] <= embeddings.TOLERANCE and report["settings"]["tokens"] == 512
    assert [p["name"] for p in report["profiles"]] == list(layers.CONTENDERS)
    for profile in report["profiles"]:
        assert len(profile["layers"]) == 6 and profile["embedding"] > 0
        assert all(layer.keys() == set(layers.PARTS) and min(layer.values()) > 0 for layer in profile["layers"])
        assert profile["whole"] > sum(sum(layer.values()) for layer in profile["layers"]) > 0
        assert any(profile["name"] in line for line in lines)
    assert (tmp_path / "new" / "layers.png").read_bytes().startswith(b"\x89PNG")


def test_time_belongs_to_the_innermost_part(small_encoder, monkeypatch):
    """A clock that goes on by one at each look: as many seconds as there are looks, none of them twice."""
    torch = pytest.importorskip("torch")
    pytest.importorskip("transformers")
    monkeypatch.setattr(layers.time, "perf_counter", iter(range(1000)).__next__)
    bert = layers.in_transformers(small_encoder)
    with torch.no_grad(), layers._Clock(bert) as clock:
        bert(torch.arange(9)[None])
        seconds = clock.read()
    of_one = {"attention": 4, "projections": 4, "MLP": 2}
    assert {part: seconds[0, part] for part in of_one} == of_one
    assert seconds[None, "embedding"] == 1 and clock.read() == {}
    assert sum(seconds.values()) == 2 * (2 + LAYERS * 7) - 1
    bert(torch.arange(9)[None])
    assert clock.read() == {}


def test_profile_tells_a_disagreement(real, tmp_path, monkeypatch):
    for package in ("matplotlib", "torch", "transformers"):
        pytest.importorskip(package)
    profile = layers.Profile("one", 1.0, [dict.fromkeys(layers.PARTS, 1.0)], 1.0)
    monkeypatch.setattr(layers, "measure", lambda *_: ([profile] * 3, math.nan))
    lines = []
    assert not layers.run(tmp_path, quick=True, say=lines.append)
    assert any("TOO FAR APART" in line for line in lines)


def test_share_of_other_programs_is_a_share():
    assert 0 <= Others().share() <= 1


def test_readme_shows_the_committed_figures():
    root = Path(__file__).resolve().parents[1]
    found = [json.loads(path.read_text()) for path in (root / "benchmarks" / "results").glob("demo_cpu-*.json")]
    if not found:
        pytest.skip("benchmarks/results/demo_cpu-MACHINE.json is not measured yet")
    readme = (root / "README.md").read_text()
    for row in max(found, key=lambda record: record["date"])["results"]:
        if row["tokens"] == 16384:
            assert f"| {row['name']} | {row['pairs_percent']:.3g} % | {row['ms']:.4g} |" in readme
