"""The command `spattn`: what it prints, what it exits with, and that no user error ends in a traceback."""

import re
import subprocess
import sys

import pytest

import spattn
from spattn import patterns as p
from spattn.cli import main
from spattn.patterns.registry import parse

DRAW = ["draw", "sliding_window", "--param", "left=4", "--q-len", "16"]

TWO_HEADS = spattn.patterns.PerHead((spattn.patterns.Causal(), spattn.patterns.Full())).to_json()


def run(capsys, *argv):
    """Exit code, standard output and standard error of one call."""
    try:
        code = main([str(a) for a in argv])
    except SystemExit as leave:  # argparse
        code = leave.code
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@pytest.mark.parametrize("argv", [["--help"], ["info", "--help"], ["draw", "--help"]])
def test_help(capsys, argv):
    code, out, _ = run(capsys, *argv)
    assert code == 0
    assert out.startswith("usage: spattn")


def test_info(capsys):
    code, out, _ = run(capsys, "info")
    assert code == 0
    assert "numpy" in out
    for backend in ("cpu", "cuda", "reference"):
        assert f"backend {backend}" in out


def test_installed_command_and_module_are_the_same():
    command = [sys.executable, "-m", "spattn", "draw", "--help"]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "spattn draw" in result.stdout
    from importlib.metadata import entry_points

    (script,) = entry_points(group="console_scripts", name="spattn")
    assert script.load() is main


@pytest.mark.parametrize(
    "argv",
    [
        [],
        ["paint"],
        ["draw", "sliding_window"],  # left is missing
        ["draw", "mask", "--param", "mask=3"],
        ["draw", TWO_HEADS, "--q-len", "4", "--head", "2"],
        ["draw", TWO_HEADS, "--q-len", "4", "--head", "-1"],
        ["draw", "causal", "--head", "first"],
        ["draw", "no_such_pattern", "-o", "x.png"],
        ["draw", "sliding_window", "--param", "width=3", "-o", "x.png"],
        ["draw", "sliding_window", "--param", "left=-3", "-o", "x.png"],
        ["draw", "sliding_window", "--param", "left", "-o", "x.png"],
        ["draw", "sliding_window", "--param", "left=3", "-o", "x.doc"],
        ["draw", "axial", "--param", "grid=(4,4)", "--param", "axis=0", "--q-len", "17", "-o", "x.png"],
        ["draw", "causal", "--q-len", "0", "-o", "x.png"],
        ["draw", "causal", "--kv-len", "many", "-o", "x.png"],
        ["draw", "{broken json", "-o", "x.png"],
        ["draw", "causal and sinks(4)"],
        ["draw", "causal & __import__('os').remove('x')"],
        ["draw", "causal & sinks(4) +"],
        ["draw", "causal & sinks(print)"],
        ["draw", "causal & sinks(-1)"],
        ["draw", "causal & sinks('four')"],
        ["draw", "sinks(**{'count': 4})"],
        ["draw", "("],
        ["draw", ""],
        ["draw", "causal & sinks(4)", "--param", "count=4"],
        ["draw", '{"pattern": "causal"}', "--param", "left=3", "-o", "x.png"],
    ],
    ids=" ".join,
)
def test_wrong_usage_exits_with_2_and_says_why_in_one_line(capsys, tmp_path, monkeypatch, argv):
    monkeypatch.chdir(tmp_path)
    code, out, err = run(capsys, *argv)
    assert code == 2
    assert out == ""
    assert [line for line in err.splitlines() if "error: " in line] == err.splitlines()[-1:]
    assert "Traceback" not in err
    assert not list(tmp_path.iterdir())


def test_draw_writes_a_picture(capsys, tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "window.png"
    code, out, _ = run(capsys, *DRAW, "-o", path)
    assert code == 0
    assert path.read_bytes().startswith(b"\x89PNG")
    assert str(path) in out


def test_draw_reads_what_to_json_writes(capsys, tmp_path):
    pytest.importorskip("matplotlib")
    pattern = spattn.patterns.Causal() & (spattn.patterns.Sinks(2) | spattn.patterns.SlidingWindow(4, 0))
    path = tmp_path / "composed.svg"
    code, _, err = run(capsys, "draw", pattern.to_json(), "--q-len", 20, "--kv-len", 30, "-o", path)
    assert (code, err) == (0, "")
    assert path.stat().st_size > 1000


def test_draw_without_a_pattern_lists_them(capsys):
    code, out, _ = run(capsys, "draw")
    assert code == 0
    lines = out.splitlines()
    assert [line.partition("(")[0] for line in lines[::2]] == spattn.patterns.registry.names()
    assert "sliding_window(left, right=None)" in lines and "causal()" in lines
    assert all(line.startswith("    ") and line.strip() for line in lines[1::2])


@pytest.mark.parametrize(
    "text, pattern",
    [
        ("causal", p.Causal()),
        (" sliding_window(255, 0) ", p.SlidingWindow(255, 0)),
        ("causal & sliding_window(255, right=-1)", p.Causal() & p.SlidingWindow(255, -1)),
        ("(sinks(4) | ~block_local(8)) - causal()", (p.Sinks(4) | ~p.BlockLocal(8)) - p.Causal()),
        ("neighborhood((8, 8), [3, 5])", p.Neighborhood((8, 8), (3, 5))),
        ("axial((2, 3), -1)", p.axial((2, 3), -1)),
        ("per_head((causal, ~sinks(2) & causal))", p.PerHead((p.Causal(), ~p.Sinks(2) & p.Causal()))),
        ("mask([[True, False]])", p.Mask([[True, False]])),
        ("deepspeed_fixed(4, attention='unidirectional')", p.deepspeed.fixed(4, attention="unidirectional")),
    ],
)
def test_descriptions(text, pattern):
    assert parse(text) == pattern


@pytest.mark.parametrize(
    "text, message",
    [
        (
            "causal & slidng_window(4)",
            "pattern: expected one of .*; got 'slidng_window'; did you mean 'sliding_window'?",
        ),
        (
            "sliding_window",
            r"pattern: expected sliding_window\(left, right=None\), missing a required .*: 'left'",
        ),
        ("sinks(4, width=3)", r"pattern: expected sinks\(count\), got an unexpected keyword argument 'width'"),
        ("sinks(2 + 3)", "pattern: expected a description like .*, got '2 \\+ 3'"),
        ("causal and full", "pattern: expected a description like .*, got 'causal and full'"),
    ],
)
def test_descriptions_that_are_none(capsys, text, message):
    code, _, err = run(capsys, "draw", text)
    assert code == 2 and re.search(message, err), err


@pytest.mark.parametrize("argv", [["--version"], ["info"]])
def test_version(capsys, argv):
    code, out, _ = run(capsys, *argv)
    assert code == 0 and out.split()[:2] == ["spattn", spattn.__version__]


@pytest.mark.parametrize(
    "pattern, name",
    [
        ("causal", "causal.png"),
        ('{"pattern": "causal"}', "pattern.png"),
        ("causal & sinks(4)", "pattern.png"),
    ],
)
def test_draw_names_the_picture_itself(capsys, tmp_path, monkeypatch, pattern, name):
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    assert run(capsys, "draw", pattern) == (0, f"wrote {tmp_path / name}\n", "")
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_draw_draws_the_head_that_is_asked_for(capsys, tmp_path):
    pytest.importorskip("matplotlib")
    pictures = []
    for n, argv in enumerate(([TWO_HEADS, "--head", "0"], [TWO_HEADS, "--head", "1"], ["causal"], ["full"])):
        assert run(capsys, "draw", *argv, "--q-len", "8", "-o", tmp_path / f"{n}.png")[0] == 0
        pictures.append((tmp_path / f"{n}.png").read_bytes())
    assert pictures[:2] == pictures[2:] and pictures[0] != pictures[1]


def test_draw_where_nothing_can_be_written(capsys, tmp_path):
    pytest.importorskip("matplotlib")
    code, _, err = run(capsys, *DRAW, "-o", tmp_path / "no such folder" / "x.png")
    assert code == 1
    assert len(err.splitlines()) == 1
