"""docs/faults.rst, "Threads and processes" 31-36, "Files and caches" 40: each test is named by its number there."""

import ast
import os
import threading
from pathlib import Path

import numpy as np
import pytest

import spattn
from spattn import cpu
from spattn import patterns as p
from spattn.testing import inputs

DIGEST = """
import hashlib, sys
import numpy as np
{first}
import spattn
from spattn import cpu, patterns as p
from spattn.testing import inputs

def digest():
    found = hashlib.sha256()
    q, k, v = inputs(1, 2, 1, 700, 700, 32)
    for isa in cpu.instruction_sets():
        for pattern in (p.Causal(), p.longformer(100, global_tokens=(0, 333)), p.strided(50)):
            for x in cpu.forward(q, k, v, spattn.plan_for(pattern, q, k, v, backend="cpu"), 0.2, isa=isa):
                found.update(x.tobytes())
    return found.hexdigest()
"""


@pytest.fixture(scope="module")
def digest():
    """The digest that every process, thread and number of threads must reproduce."""
    space = {}
    exec(DIGEST.format(first=""), space)
    return space["digest"]()


# -- 31 to 36 ----------------------------------------------------------------------------------------------------------


def test_fault_31_two_threads_of_a_hundred_calls():
    q, k, v = inputs(1, 2, 2, 200, 200, 16)
    made = [p.Causal(), p.SlidingWindow(30), p.longformer(20, global_tokens=3)]
    expected = [spattn.attention(q, k, v, pattern) for pattern in made]
    wrong = []

    def work(first):
        for n in range(first, first + 100):
            if not np.array_equal(spattn.attention(q, k, v, made[n % 3]), expected[n % 3]):
                wrong.append(n)

    threads = [threading.Thread(target=work, args=(first,)) for first in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not wrong and not any(thread.is_alive() for thread in threads)


def test_fault_31_threads_that_plan_the_same_pattern_at_once():
    plans = []
    barrier = threading.Barrier(4)

    def work():
        barrier.wait()
        plans.append(spattn.plan(p.strided(37), 3000))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert len(plans) == 4 and all(plan is spattn.plan(p.strided(37), 3000) for plan in plans)


FORK = """
import multiprocessing, os
before = digest()
assert cpu.num_threads() >= 1
context = multiprocessing.get_context("fork")
with context.Pool(2) as pool:
    print({before, *(pool.apply_async(digest).get(120) for _ in range(3)), digest()})
"""


USE_TORCH = "import torch; torch.ones(9, 9) @ torch.ones(9, 9)"


@pytest.mark.parametrize("first", ["", USE_TORCH], ids=["alone", "with torch"])
def test_fault_32_fork_after_openmp(python, digest, first):
    needs_torch(first)
    source = DIGEST.format(first=first) + FORK
    assert python(source, OMP_NUM_THREADS="4") == f"{{'{digest}'}}\n"


@pytest.mark.slow
@pytest.mark.parametrize("order", ["torch first", "spattn first", "scipy first"])
def test_fault_33_two_openmp_runtimes(python, digest, order):
    other = "scipy.linalg" if order == "scipy first" else "torch"
    pytest.importorskip(other.split(".")[0])
    run = "scipy.linalg.lu(np.ones((300, 300)))" if "scipy" in other else "torch.ones(500, 500) @ torch.ones(500, 500)"
    use = f"import {other}\n{run}\n"
    first, then = ("", use) if order == "spattn first" else (use, "")
    source = DIGEST.format(first=first) + f"a = digest()\n{then}b = digest()\nprint(a, b)"
    assert python(source, OMP_NUM_THREADS="3") == f"{digest} {digest}\n"


@pytest.mark.parametrize("backend", ["loky", "threading", "multiprocessing"])
def test_fault_34_inside_joblib(python, digest, backend):
    pytest.importorskip("joblib")
    source = f"""
from pathlib import Path
Path("work.py").write_text({DIGEST.format(first="")!r})
import sys
sys.path.insert(0, ".")
if __name__ == "__main__":
    import joblib, work
    print(set(joblib.Parallel(n_jobs=2, backend={backend!r})(joblib.delayed(work.digest)() for _ in range(4))))
"""
    path = os.pathsep.join([".", *filter(None, [os.environ.get("PYTHONPATH")])])
    assert python(source, PYTHONPATH=path) == f"{{'{digest}'}}\n"


@pytest.mark.slow
def test_fault_34_inside_a_data_loader(python, digest):
    pytest.importorskip("torch")
    source = (
        DIGEST.format(first="import torch")
        + """
class Texts(torch.utils.data.Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, n):
        return digest()

digest()  # OpenMP is in use before the workers are forked
loader = torch.utils.data.DataLoader(Texts(), batch_size=2, num_workers=2, multiprocessing_context="fork")
print({one for batch in loader for one in batch})
"""
    )
    assert python(source) == f"{{'{digest}'}}\n"


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_fault_34_honours_omp_num_threads(python, threads):
    source = "import spattn.cpu; print(spattn.cpu._core.OPENMP, spattn.cpu.num_threads())"
    openmp, number = python(source, OMP_NUM_THREADS=str(threads)).split()
    assert int(number) == (threads if openmp == "True" else 1)


def test_fault_34_honours_threadpoolctl():
    threadpoolctl = pytest.importorskip("threadpoolctl")
    before = cpu.num_threads()
    with threadpoolctl.threadpool_limits(1):
        assert cpu.num_threads() == 1
    assert cpu.num_threads() == before


def test_fault_34_honours_affinity(python):
    source = """
import os
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
import spattn.cpu
print(spattn.cpu.num_threads())
"""
    assert python(source, OMP_NUM_THREADS="") == "1\n"


@pytest.mark.parametrize("threads", [1, 2, 3, 8])
def test_fault_36_any_number_of_threads(python, digest, threads):
    assert python(DIGEST.format(first="") + "print(digest())", OMP_NUM_THREADS=str(threads)) == f"{digest}\n"


def test_fault_36_reference_does_not_depend_on_threads():
    threadpoolctl = pytest.importorskip("threadpoolctl")
    arrays = inputs(1, 2, 1, 90, 90, 64)
    with threadpoolctl.threadpool_limits(1):
        one = spattn.attention(*arrays, "causal", backend="reference")
    assert np.array_equal(one, spattn.attention(*arrays, "causal", backend="reference"))


# -- 40 ----------------------------------------------------------------------------------------------------------------


def calls(tree):
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            yield ast.unparse(node.func), node


def test_fault_40_no_shell_anywhere():
    """Compilers are started with argument lists: no ``shell=True``, no ``os.system``, no command in one string."""
    started = 0
    for path in sorted(Path(spattn.__file__).parent.rglob("*.py")):
        for name, call in calls(ast.parse(path.read_text(encoding="utf-8"))):
            assert name not in (
                "os.system",
                "os.popen",
                "subprocess.getoutput",
                "subprocess.getstatusoutput",
                "eval",
                "exec",
            ), f"{path}: {name}"
            if name.startswith("subprocess."):
                started += 1
                assert not any(word.arg == "shell" for word in call.keywords), f"{path}: shell="
                words = not isinstance(call.args[0], (ast.Constant, ast.JoinedStr))
                assert words, f"{path}: a command line"
    assert started, "the CUDA compiler is started somewhere"


def needs_torch(source):
    if "torch" in source:
        pytest.importorskip("torch")
