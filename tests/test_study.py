"""The scripts of the study: naive attention, extrapolated times, separate kernels, layers, bounds, profiles."""

import importlib
import os
from pathlib import Path

import numpy as np
import pytest

from spattn import cpu, set_num_threads
from spattn import patterns as p
from spattn.testing import dense_mask
from spattn.testing import naive as exact
from spattn.testing import naive_gradients as exact_gradients

torch = pytest.importorskip("torch")

FOLDER = Path(__file__).parents[1] / "benchmarks"
FEW = {
    "dense": p.Full(),
    "Longformer ±256 + 16": p.longformer(4, global_tokens=3),
    "DeepSpeed BigBird": p.BigBird(8, head=0),
}


@pytest.fixture
def script(monkeypatch):
    """Import a script of the study, with few patterns."""
    for folder in (FOLDER, FOLDER / "peers", FOLDER.parent / "examples", FOLDER / "study"):
        monkeypatch.syspath_prepend(folder)
    found = {name: importlib.import_module(name) for name in ("study_problems", "study_cpu", "study_cuda")}
    monkeypatch.setattr(found["study_problems"], "PATTERNS", FEW)
    return importlib.import_module


def test_naive_attention_in_blocks(script):
    study, pattern = script("study_problems"), p.Causal() | p.Sinks(5)
    given = study.inputs(2, 70, torch.float64, "cpu")
    mask = dense_mask(pattern, 1, 2, 70, 70)
    masked = torch.from_numpy(~mask[0, 0])
    q, k, v, dout = (x.detach().numpy() for x in given)
    np.testing.assert_allclose(study.naive_forward(*given[:3], masked, 32), exact(q, k, v, mask)[0], atol=1e-12)
    for found, want in zip(
        study.naive_gradients(*given, masked, 32), exact_gradients(dout, q, k, v, mask), strict=True
    ):
        np.testing.assert_allclose(found, want, atol=1e-12)
    assert torch.equal(
        study.outside_window(70, "cpu", 3), ~torch.from_numpy(dense_mask(p.SlidingWindow(3), 1, 1, 70, 70)[0, 0])
    )


def test_results_are_checked_before_they_are_timed(script, monkeypatch):
    study = script("study_problems")
    given = study.inputs(1, 64, torch.float32, "cpu")
    errors = study.check(given, 24, 1e-5, {study.NAIVE, *FEW})
    assert errors.keys() == {study.NAIVE, *FEW} and 0 < max(errors.values()) < 1e-5
    monkeypatch.setattr(study, "gradients", lambda q, k, v, dout, pattern: (q.detach(), k.detach(), v.detach()))
    with pytest.raises(AssertionError, match="dense, 64 tokens: relative error"):
        study.check(given, 24, 1e-5, {study.NAIVE, *FEW})


def test_speedups_and_extrapolated_times(script, monkeypatch):
    study_cpu = script("study_cpu")
    threads = torch.get_num_threads(), cpu.num_threads()
    torch.set_num_threads(1)
    set_num_threads(1)
    try:
        measured = study_cpu.speedup((64, 128), 1)
        monkeypatch.setattr(study_cpu, "LONGEST_SECONDS", 0.0)
        extrapolated = study_cpu.speedup((64, 128), 1)
    finally:
        torch.set_num_threads(threads[0])
        set_num_threads(threads[1])
    assert not any(row["extrapolated"] for row in measured) and len(measured) == len(extrapolated) == 2 * 2 * 4
    for short, long in ((extrapolated[n], extrapolated[n + 4]) for n in (0, 1, 2, 3, 8, 9, 10, 11)):
        assert (short["extrapolated"], long["extrapolated"]) == (False, True)
        assert long["median_ms"] == pytest.approx(4 * short["median_ms"], abs=1e-3)
        assert long["times_naive_shown"].startswith("≈ ") and not short["times_naive_shown"].startswith("≈")
        assert long["times_naive_extrapolated"] and not short["times_naive_extrapolated"]
    for row, pattern in zip(measured[1:4], FEW.values(), strict=True):
        allowed = dense_mask(pattern, 1, 1, 64, 64).mean()
        assert row["pairs_percent"] == pytest.approx(100 * allowed, abs=1e-3)


@pytest.mark.parametrize(("before", "meanwhile", "kept"), [(0.5, 0.0, 1), (0.0, 0.5, 1), (0.0, 0.0, 2)])
def test_two_threads_need_an_idle_machine(script, monkeypatch, before, meanwhile, kept):
    study_cpu, written = script("study_cpu"), {}
    monkeypatch.setattr(study_cpu.sys, "argv", ["study_cpu.py", "--only", "speedup"])
    monkeypatch.setattr(study_cpu, "taken", lambda: before)
    monkeypatch.setattr(study_cpu, "child", lambda *_, **__: {"rows": [{}], "taken_by_other_programs": meanwhile})
    monkeypatch.setattr(
        study_cpu.record, "write", lambda name, rows, **facts: written.update(facts, name=name, rows=rows)
    )
    assert study_cpu.main() == 0
    assert (written["name"], len(written["rows"])) == ("study_speedup_cpu", kept)
    assert ("other programs" in str(written["conditions"]["speedup2"])) == (kept == 1)


def test_separate_kernels(script, monkeypatch):
    study, study_cuda = script("study_problems"), script("study_cuda")
    monkeypatch.setattr(study_cuda, "DEVICE", "cpu")
    q, k, v = (x.detach() for x in study.inputs(2, 96, torch.float32, "cpu")[:3])
    for pattern in study_cuda.UNFUSED.values():
        mask = dense_mask(pattern, 1, 2, 96, 96)
        found = study_cuda.Unfused(pattern, 96, study_cuda.torch_softmax)(q, k, v)
        np.testing.assert_allclose(found, exact(*(x.numpy().astype(float) for x in (q, k, v)), mask)[0], atol=1e-5)


def test_layers_of_an_encoder(script):
    pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48}
    rows = script("study_problems").layer_rows("cpu", sizes, 96, torch.float32, 1)
    assert len(rows) == 5 * 3
    for contender in {row["contender"] for row in rows}:
        first, second, both = (row for row in rows if row["contender"] == contender)
        assert both["attention_ms"] == pytest.approx(first["attention_ms"] + second["attention_ms"], abs=2e-3)
        assert both["whole_ms"] > both["attention_ms"] + both["projections_ms"] + both["MLP_ms"] > 0


def test_bounds(script):
    class Ceilings:
        def median(self, name):
            return {"fma_fp32": 100.0, "exp_fp32": 10.0, "read_dram": 1.0}[name]

    class Problem:
        tokens, nnz, efficiency = 1000, 64_000, 0.5

    bound = script("study_cpu").bound
    row = bound("few", "forward", Problem, Problem, 10.0, Ceilings())  # 8 heads of 64
    assert (row["products_ms"], row["exponentials_ms"], row["dram_ms"]) == (1.311, 0.051, 8.192)
    assert (row["bound"], row["floor_percent"], row["efficiency_percent"]) == ("DRAM", 81.9, 50.0)
    row = bound("few", "forward and backward", Problem, Problem, 100.0, Ceilings())
    assert (row["products_ms"], row["exponentials_ms"], row["dram_ms"]) == (4.588, 0.102, 24.576)


def test_profile_of_nsight_compute(script, tmp_path):
    """Of its table the units are skipped, and kernels of little time."""
    study_profile = script("study_profile_cuda")
    ncu = tmp_path / "ncu"
    names = [study_profile.TIME, *(each[-1] for each in study_profile.METRICS.values())]
    lines = [
        "==PROF== Connected",
        ",".join(f'"{x}"' for x in ["ID", "Kernel Name", *names]),
        '"",""' + ',"%"' * len(names),
    ]
    lines += [f'"{n}","kernel_{n}(int)","{taken}"' + ',"12.34"' * 6 for n, taken in enumerate(("1,000,000", "5000"))]
    (tmp_path / "table").write_text("\n".join(lines))
    known = "\n".join(name.partition(".")[0] for name in names)
    ncu.write_text(f'#!/bin/sh\n[ "$1" = --query-metrics ] && echo "{known}" && exit\ncat {tmp_path}/table\n')
    os.chmod(ncu, 0o755)
    found = study_profile.metrics(str(ncu))
    assert list(found.values()) == names[1:]
    (row,) = study_profile.profile(str(ncu), "decoding", found, True)
    assert row == {"problem": "decoding", "kernel": "kernel_0", "us": 1000.0} | dict.fromkeys(found, 12.3)
    ncu.write_text("#!/bin/sh\necho ERR_NVGPUCTRPERM\nexit 1\n")
    with pytest.raises(SystemExit, match="ERR_NVGPUCTRPERM"):
        study_profile.profile(str(ncu), "decoding", found, True)
