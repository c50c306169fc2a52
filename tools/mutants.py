"""Mutation tests: do the tests notice a changed operator, constant or condition?

    python tools/mutants.py [--files GLOB] [--count 60] [--seed 0] [--minutes 10] [--native | --gpu] [PART ...]

Draws mutants of the files in mutants.toml by a seed, puts each one into a copy of the checkout and runs the tests that
the file's rule names. One line for each mutant:

    caught     the test that failed
    known      the tests pass; mutants_survivors.toml has the reason
    SURVIVED   the tests pass, and mutants_survivors.toml does not list it
    invalid    it does not compile
    skipped    no test of the rule runs on this machine

The exit status is 1 if a mutant survives that is not listed, if a listed one does not exist, or if a test that caught a
mutant also fails without one. A mutant is named by its file, function, operator and number within the function
(``src/spattn/request/layout.py::Layout.view guard 1``; tools/mutator has the operators): PART selects those that
contain it.
``--list`` prints mutants instead.

Python files are the default: the compiled modules are those of the installed package. ``--native`` is for Cython and
C++, which are compiled without optimisation; ``--gpu`` for CUDA kernels, which needs a GPU and nvcc.
"""

from __future__ import annotations

import argparse
import fcntl
import fnmatch
import hashlib
import importlib.util
import os
import queue
import re
import resource
import signal
import subprocess
import sys
import tempfile
import threading
import time
import tomllib
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from mutator import Mutant, mutants_of

ROOT = Path(__file__).resolve().parents[1]
RULES = Path(__file__).with_suffix(".toml")
SURVIVORS = Path(__file__).with_name("mutants_survivors.toml")
CPU_LIMIT, TIME_LIMIT = 150, 900  # seconds for the tests of a mutant: some loop for ever, a few wait for ever
KINDS = {".py": "python"} | dict.fromkeys((".pyx", ".h", ".cpp"), "native") | dict.fromkeys((".cu", ".cuh"), "gpu")
BAD = "SURVIVED", "stale", "unreliable"


@dataclass(frozen=True)
class Rule:
    """Files, the tests that should notice their mutants (options of pytest too), and the instruction set to compile."""

    files: list[str]
    tests: list[str]
    isa: str = "baseline"

    def matches(self, file: str) -> bool:
        return any(fnmatch.fnmatch(file, pattern) for pattern in self.files)

    def tests_of(self, file: str) -> list[str]:
        """The tests for a file, the one of its name first."""
        named = [test.format(name=Path(file).stem.lstrip("_")) for test in self.tests]
        return [t for t in dict.fromkeys(named) if t.startswith("--") or (ROOT / t.partition("::")[0]).exists()]


def namespace_of(file: str) -> str | None:
    return KINDS.get(Path(file).suffix)


class DynamicMask:
    """The files that have mutants, by the rules."""

    def __init__(self, rules: Path = RULES, root: Path = ROOT):
        read = tomllib.loads(rules.read_text())
        self.root, self.skipped_functions, self.skipped_files = root, read["skipped_functions"], read["skipped_files"]
        self.rules = [Rule(**entry) for entry in read["rule"]]

    def rule_of(self, file: str) -> Rule | None:
        skipped = any(fnmatch.fnmatch(file, pattern) for pattern in self.skipped_files)
        return None if skipped else next((rule for rule in self.rules if rule.matches(file)), None)

    def files(self, kind: str, pattern: str = "*") -> list[str]:
        found = (str(path.relative_to(self.root)) for path in (self.root / "src").rglob("*.*"))
        return sorted(f for f in found if namespace_of(f) == kind and fnmatch.fnmatch(f, pattern) and self.rule_of(f))

    def mutants(self, file: str) -> list[Mutant]:
        found = mutants_of(file, (self.root / file).read_text())
        return [m for m in found if not any(fnmatch.fnmatch(m.function, name) for name in self.skipped_functions)]

    def stale(self, survivors: dict[str, dict[str, str]]) -> list[str]:
        """Listed survivors that are no mutants of the sources."""
        found = []
        for file, places in survivors.items():
            exists = (self.root / file).is_file() and self.rule_of(file) is not None
            own = {mutant.place for mutant in self.mutants(file)} if exists else set()
            found += [f"{file}::{place}" for place in places if place not in own]
        return found


def draw(mutants: Iterable[Mutant], count: int, seed: int) -> list[Mutant]:
    """`count` mutants, or all if 0. Each has a rank by its name and the seed: edits elsewhere do not change it."""

    def rank(mutant: Mutant) -> bytes:
        return hashlib.sha256(f"{seed} {mutant.identity}".encode()).digest()

    return sorted(mutants, key=rank)[: count or None]


class Tree:
    """A worker's copy of the checkout, with a build folder for each instruction set."""

    def __init__(self, folder: Path):
        self.source, self.builds = folder / "source", folder / "builds"
        self.synchronise()

    def synchronise(self) -> None:
        """Makes the copy equal to the checkout. Equal files keep their time stamps, so that ninja rebuilds nothing."""
        listed = subprocess.run(
            ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
            cwd=ROOT,
            check=True,
            capture_output=True,
            text=True,
        ).stdout.split("\0")
        wanted = {name for name in listed if name and (ROOT / name).is_file()}
        for path in [p for p in self.source.rglob("*") if p.is_file()]:
            if str(path.relative_to(self.source)) not in wanted:
                path.unlink()
        for name in wanted:
            self.write(name, (ROOT / name).read_bytes())

    def write(self, name: str, content: bytes) -> None:
        path = self.source / name
        if not path.exists() or path.read_bytes() != content:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)

    def link(self) -> None:
        """Puts the compiled modules of the installed package into the copy."""
        spec = importlib.util.find_spec("spattn")
        folders = [Path(folder) for folder in spec.submodule_search_locations] if spec else []
        modules = [(folder, module) for folder in folders for module in folder.rglob("*.so")]
        if not modules:
            raise RuntimeError("spattn is not installed: run `make mutants`")
        for folder, module in modules:
            self.write(str(Path("src/spattn") / module.relative_to(folder)), module.read_bytes())

    def build(self, isa: str) -> None:
        """Compiles the copy, as far as it has changed."""
        folder = self.builds / isa
        if not (folder / "build.ninja").exists():
            options = f"-Disa={'[]' if isa == 'baseline' else isa}", f"-Damx_emulated={str(not has_amx()).lower()}"
            execute("meson", "setup", folder, self.source, "-Doptimization=0", *options)
        execute("ninja", "-C", folder)
        modules = list((folder / "src").rglob("*.so"))
        assert modules, "nothing was compiled"
        for module in modules:
            self.write(str(module.relative_to(folder)), module.read_bytes())

    def test(self, tests: list[str], *options: str) -> tuple[int, str]:
        """(exit status, output) of pytest; after TIME_LIMIT the status is -SIGALRM."""
        environment = {
            "PYTHONPATH": os.pathsep.join([str(self.source / "src"), os.environ.get("PYTHONPATH", "")]),
            "PYTHONDONTWRITEBYTECODE": "1",  # its time stamps count in seconds
            "SPATTN_HYPOTHESIS_PROFILE": "mutants",
            "SPATTN_CACHE_DIR": str(self.builds / "cubins"),
        }
        process = subprocess.Popen(
            [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *options, *tests],
            cwd=self.source,
            env=os.environ | environment,
            text=True,
            start_new_session=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            preexec_fn=set_limits,
        )
        try:
            output, _ = process.communicate(timeout=TIME_LIMIT)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            output, _ = process.communicate()
            return -signal.SIGALRM, output
        return process.returncode, output


def set_limits() -> None:
    """Limits a test process to CPU_LIMIT and to the machine's memory, or to what tests reserve, which is 17 GB."""
    memory = max(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), 1 << 35)
    resource.setrlimit(resource.RLIMIT_DATA, (memory, memory))
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_LIMIT, CPU_LIMIT + 5))


def has_amx() -> bool:
    return "amx_bf16" in Path("/proc/cpuinfo").read_text()


def execute(*command) -> None:
    """Runs a program of the build; RuntimeError with its output if it fails."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # meson, ninja and cython of this environment
    done = subprocess.run(
        [str(word) for word in command], env=os.environ | {"PATH": path}, capture_output=True, text=True
    )
    if done.returncode:
        raise RuntimeError(f"{command[0]}: exit status {done.returncode}\n{done.stdout}{done.stderr}")


def failed_tests(output: str) -> list[str]:
    return re.findall(r"^(?:FAILED|ERROR) (.+?)(?: - |$)", output, re.MULTILINE)


def noticed_by(status: int, output: str) -> str:
    """The test that failed, or what else ended the run."""
    if status == -signal.SIGALRM:
        return f"the time limit of {TIME_LIMIT} s"
    failed = failed_tests(output)
    return failed[0] if failed else f"signal {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"


def judge(tree: Tree, mutant: Mutant, rule: Rule, known: bool) -> tuple[str, str]:
    """(verdict, explanation)."""
    original, kind, tests = (
        (tree.source / mutant.file).read_text(),
        namespace_of(mutant.file),
        rule.tests_of(mutant.file),
    )
    tree.write(mutant.file, mutant.apply(original).encode())
    try:
        if kind == "native":
            tree.build(rule.isa)
        status, output = tree.test(tests, "-x", *(["-m", "gpu"] if kind == "gpu" else []))
    except RuntimeError:
        return "invalid", "does not compile"
    finally:
        tree.write(mutant.file, original.encode())
    if status == 5 or status == 0 and " passed" not in output:
        return "skipped", f"no test runs here: {' '.join(tests)}"
    if status:
        return "caught", noticed_by(status, output)
    return ("known" if known else "SURVIVED"), f"line {mutant.line}: {mutant.change(original)}"


def spread(trees: list[Tree], jobs: list, run: Callable) -> None:
    """``run(tree, job)`` for every job, each tree taking one at a time; raises the first exception."""
    waiting: queue.SimpleQueue = queue.SimpleQueue()
    for job in jobs:
        waiting.put(job)
    errors: list[Exception] = []

    def work(tree):
        while not errors:
            try:
                run(tree, waiting.get(block=False))
            except queue.Empty:
                return
            except Exception as error:
                errors.append(error)

    threads = [threading.Thread(target=work, args=(tree,)) for tree in trees]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def run_all(
    mutants: list[Mutant],
    selection: DynamicMask,
    survivors: dict[str, dict[str, str]],
    trees: list[Tree],
    minutes: float,
) -> Counter:
    """Judges mutants until the time is over; the number of each verdict."""
    verdicts: Counter = Counter()
    catching: set[str] = set()
    printing = threading.Lock()
    end = time.monotonic() + 60 * minutes

    def run(tree: Tree, mutant: Mutant) -> None:
        begin = time.monotonic()
        if begin > end:
            return
        reason = survivors.get(mutant.file, {}).get(mutant.place)
        verdict, explanation = judge(tree, mutant, selection.rule_of(mutant.file), reason is not None)
        with printing:
            verdicts[verdict] += 1
            if verdict == "caught" and "::" in explanation:
                catching.add(re.sub(r"\[.*", "", explanation))
            if verdict == "caught" and reason is not None:
                explanation += f"; remove it from {SURVIVORS.name}"
            if verdict == "known":
                explanation += f"\n           {reason}"
            seconds = time.monotonic() - begin
            print(f"{verdict:9}  {mutant.identity}  ({seconds:.0f} s)\n           {explanation}", flush=True)

    spread(trees, mutants, run)
    left = len(mutants) - sum(verdicts.values())
    if left:
        print(f"{minutes} minutes are over: {left} mutants are left")
    if catching:  # do these tests pass without a mutant?
        on_gpu = namespace_of(mutants[0].file) == "gpu"
        _, output = trees[0].test(sorted(catching), *(["-m", "gpu"] if on_gpu else []))
        for test in failed_tests(output):
            verdicts["unreliable"] += 1
            print(f"unreliable {test}: it also fails without a mutant")
    return verdicts


def read_survivors(path: Path = SURVIVORS) -> dict[str, dict[str, str]]:
    return tomllib.loads(path.read_text())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="*", metavar="PART", help="only mutants whose names contain one of these")
    parser.add_argument("--files", default="*", metavar="GLOB", help="only files that match")
    parser.add_argument("--count", type=int, default=60, help="mutants to draw; 0: all")
    parser.add_argument("--seed", type=int, default=0, help="another seed draws other mutants")
    parser.add_argument("--minutes", type=float, default=10, help="starts no mutant after this time")
    parser.add_argument("--list", action="store_true", help="print the mutants, run none")
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument("--native", dest="kind", action="store_const", const="native", help="Cython and C++")
    kind.add_argument("--gpu", dest="kind", action="store_const", const="gpu", help="CUDA kernels")
    parser.set_defaults(kind="python")
    parser.add_argument("--workers", type=int, help="mutants at once (default: one for each core; one with --gpu)")
    parser.add_argument("--scratch", type=Path, help="keep the copies and builds here for the next run")
    options = parser.parse_args()

    selection, survivors = DynamicMask(), read_survivors()
    found = [m for file in selection.files(options.kind, options.files) for m in selection.mutants(file)]
    found = [m for m in found if not options.parts or any(part in m.identity for part in options.parts)]
    drawn = draw(found, options.count, options.seed)
    print(f"{len(drawn)} of {len(found)} mutants", flush=True)
    if options.list:
        for mutant in sorted(drawn, key=lambda m: (m.file, m.start)):
            print(f"{mutant.identity}\n    line {mutant.line}: {mutant.change((ROOT / mutant.file).read_text())}")
        return
    stale = selection.stale(survivors)
    for identity in stale:
        print(f"stale      {identity}: no such mutant; see --list, and correct {SURVIVORS.name}")

    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as temporary:
        scratch = options.scratch.resolve() if options.scratch else Path(temporary)
        scratch.mkdir(parents=True, exist_ok=True)
        lock = (scratch / "lock").open("w")  # held until the process ends: runs share the copies
        fcntl.flock(lock, fcntl.LOCK_EX)
        workers = min(options.workers or (1 if options.kind == "gpu" else os.cpu_count()), max(len(drawn), 1))
        try:
            trees = [Tree(scratch / f"worker-{n}") for n in range(workers)]
            for tree in trees:
                tree.build("baseline") if options.kind == "native" else tree.link()
            verdicts = run_all(drawn, selection, survivors, trees, options.minutes)
        except RuntimeError as error:
            sys.exit(f"mutants: {error}")
    verdicts["stale"] = len(stale)
    shown = "caught", "known", *BAD, "invalid", "skipped"
    print(", ".join(f"{verdicts[v]} {v}" for v in shown) + f"; {time.monotonic() - begin:.0f} s")
    sys.exit(any(verdicts[verdict] for verdict in BAD))


if __name__ == "__main__":
    main()
