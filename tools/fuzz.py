"""Run the property tests repeatedly with new seeds.

    make fuzz COUNT=100000 MINUTES=60
    python tools/fuzz.py [--count 100000] [--minutes 60] [TEST ...]

Runs the tests one after the other, in random order and with the nightly profile, until enough examples are drawn or the
time is over. Prints the seed and the number of examples of each; to repeat a failure, run

    SPATTN_HYPOTHESIS_PROFILE=nightly python -m pytest --hypothesis-seed=SEED TEST

Exits with 1 if a property failed.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import re
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DRAWN = re.compile(r"- (\d+) passing(?: examples)?, (\d+) failing")  # format of Hypothesis' statistics


def pytest(*arguments: str) -> subprocess.CompletedProcess:
    """Run pytest on the property tests with the nightly profile."""
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-m", "hypothesis and not gpu", *arguments],
        cwd=ROOT,
        env=os.environ | {"SPATTN_HYPOTHESIS_PROFILE": "nightly"},
        capture_output=True,
        text=True,
        check=False,
    )


def properties(tests: list[str]) -> list[str]:
    """Names of the property tests."""
    listed = pytest("--collect-only", "-o", "addopts=--import-mode=importlib -q", *tests)
    names = {line.partition("[")[0] for line in listed.stdout.splitlines() if "::" in line}
    if listed.returncode or not names:
        sys.exit(f"fuzz: found no property test\n{listed.stdout}{listed.stderr}")
    return sorted(names)


def draw(name: str) -> tuple[int, bool]:
    """Run one test with a new seed; return (number of examples, whether it passed)."""
    seed = random.SystemRandom().randrange(2**32)
    begin = time.monotonic()
    done = pytest(f"--hypothesis-seed={seed}", "--hypothesis-show-statistics", name)
    drawn = sum(int(passing) + int(failing) for passing, failing in DRAWN.findall(done.stdout))
    skipped = done.returncode == 0 and bool(re.search(r"^\d+ skipped", done.stdout.splitlines()[-1]))
    held, seconds = done.returncode == 0 and (drawn > 0 or skipped), time.monotonic() - begin
    verdict = "skipped" if skipped else "held" if held else "FAILED"
    print(f"{verdict:7}  {drawn:6}  seed {seed:<10}  {seconds:4.0f} s  {name}", flush=True)
    if not held:
        print(done.stdout, done.stderr, flush=True)
    return drawn, held


def main() -> None:
    """Run tests until the count or the time is reached."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=100_000, help="minimum number of examples")
    parser.add_argument("--minutes", type=float, default=60, help="start no test after this time")
    parser.add_argument("tests", nargs="*", default=["tests"], help="files or tests (default: all)")
    options = parser.parse_args()
    begin, drawn, failed = time.monotonic(), 0, 0
    for name in itertools.chain.from_iterable(shuffled(properties(options.tests))):
        if drawn >= options.count or time.monotonic() - begin >= 60 * options.minutes:
            break
        examples, held = draw(name)
        drawn, failed = drawn + examples, failed + (not held)
    print(f"{drawn} examples drawn, {failed} properties failed; {time.monotonic() - begin:.0f} s")
    sys.exit(failed > 0)


def shuffled(names: list[str]):
    """Endless random permutations of the names."""
    while True:
        yield random.SystemRandom().sample(names, len(names))


if __name__ == "__main__":
    main()
