"""Compositions on a GPU: results and gradients of both families of kernels, groups and selections are those of masks.

``tools/attack_unions.py`` runs thousands of the same in minutes.
"""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import spattn
from spattn.cuda.driver import device

from . import draws, gpu
from .draws import Drawn

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.unfollowed,
]

LONGEST = [100, 150, 150, 400]
# Kernels are compiled one by one when a test first wants them, so that a test draws few kinds; the tool has all.
FEW = {"hopper": gpu.KINDS["hopper"][:1], "portable": gpu.KINDS["portable"][:2]}
EXAMPLES = settings(max_examples=max(5, settings.default.max_examples // 4))


@pytest.fixture
def family(monkeypatch):
    """``family(name)``: calls of this test are for a family of kernels; no plan that is kept is of another one."""
    pytest.importorskip("torch", reason="PyTorch is not installed")

    def choose(name):
        monkeypatch.setenv("SPATTN_CUDA_KERNEL", gpu.FAMILIES[name])
        spattn.clear_plan_cache()

    yield choose
    spattn.clear_plan_cache()


@pytest.fixture
def hopper(family):
    if device.get().capability != (9, 0):
        pytest.skip("needs a GPU of compute capability 9.0")
    family("hopper")


@pytest.fixture
def portable(family):
    family("portable")


def draw_case(source, most=6):
    case = draws.draw_case(source, source.choice(LONGEST), most)
    source.note(case)
    return case


def check(done):
    for what, wrong, _ in done:
        assert not wrong, f"{what}:\n" + "\n".join(wrong)


@pytest.mark.usefixtures("hopper")
@EXAMPLES
@given(st.data())
def test_hopper(data):
    """Calls whose plans need more tensor maps than parameters hold run on the portable kernels."""
    source = Drawn(data)
    check(gpu.of_case(source, draw_case(source), "hopper", source.choice(FEW["hopper"]), "cuda"))


@pytest.mark.usefixtures("portable")
@EXAMPLES
@given(st.data())
def test_portable(data):
    source = Drawn(data)
    check(gpu.of_case(source, draw_case(source), "portable", source.choice(FEW["portable"]), "cuda"))


@pytest.mark.usefixtures("hopper")
@EXAMPLES
@given(st.data())
def test_groups(data):
    """Of patterns, which are planned for the group, and of plans."""
    source = Drawn(data)
    kind, cases = source.choice(FEW["hopper"]), [draw_case(source, 4) for _ in range(source.integer(2, 6))]
    problems = [gpu.make_problem(source, case, *kind, kind[1]) for case in cases]
    check(gpu.of_group(problems, [case.pattern for case in cases], "cuda"))
    plans = [gpu.draw_plan(source, case, "hopper") for case in cases]
    source.note([how for how, _ in plans])
    check(gpu.of_group(problems, [plan for _, plan in plans], "cuda"))


@pytest.mark.usefixtures("hopper")
@EXAMPLES
@given(st.data())
def test_selections(data):
    source = Drawn(data)
    check(gpu.of_selection(source, draw_case(source), source.choice(FEW["hopper"]), "cuda"))
