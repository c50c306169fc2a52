"""Names within the test suite: unique file names, and a kernel family for each CUDA test."""

import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
SHARED = {"__init__.py", "conftest.py", "oracle.py"}


def test_file_names_are_unique():
    names = Counter(file.name for file in TESTS.rglob("*.py") if file.name not in SHARED)
    assert names.total() > 150
    assert [name for name, count in names.items() if count > 1] == []


@pytest.mark.parametrize(
    ("folder", "source", "message"),
    [
        (".", "def test(): ...", "mark the kernel family with pytest.mark.family, one of ['sm80', 'sm90']; got []"),
        (".", "@pytest.mark.family('sm70')\ndef test(): ...", "got ['sm70']"),
        (".", "@pytest.mark.parametrize('family', ['sm80', 'hopper'], indirect=True)\ndef test(): ...", "'hopper']"),
        ("sm90", "@pytest.mark.family('sm80')\ndef test(): ...", "one of ['sm90']; got ['sm80']"),
        ("sm90", "@pytest.mark.family('sm90')\ndef test(): ...", ""),
        (".", "@pytest.mark.parametrize('family', ['sm80', 'sm90'], indirect=True)\ndef test(): ...", ""),
    ],
)
def test_cuda_tests_name_their_kernel_family(tmp_path, folder, source, message):
    shutil.copy(TESTS / "cuda" / "conftest.py", tmp_path)
    file = tmp_path / folder / "test_any.py"
    file.parent.mkdir(exist_ok=True)
    file.write_text(f"import pytest\n\n{source}\n")
    options = "-m pytest -c /dev/null -q --collect-only -p no:cacheprovider".split()
    done = subprocess.run(
        [sys.executable, *options, f"--rootdir={tmp_path}", file], capture_output=True, text=True, check=False
    )
    assert (done.returncode == 0) == (not message), done.stdout + done.stderr
    assert message in done.stdout
