"""What this installation can do, for bug reports and for people who wonder why a backend is missing."""

from __future__ import annotations

import platform
import sys

from . import _backends

_PACKAGES = ("numpy", "ml_dtypes", "pycuda", "cuda-bindings", "torch", "cupy", "jax")


def versions() -> dict[str, object]:
    """The facts that :func:`show_versions` prints."""
    import importlib.metadata  # a fifth of the time of `import spattn`

    facts: dict[str, object] = {
        "spattn": importlib.metadata.version("spattn"),
        "python": sys.version.split()[0],
        "platform": platform.platform(),
    }
    for package in _PACKAGES:
        try:
            facts[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            facts[package] = "not installed"
    for name in _backends.names():
        reason = _backends.why_unavailable(name)
        facts[f"backend {name}"] = "available" if reason is None else f"unavailable: {reason}"
        if reason is None:
            facts.update({f"  {key}": value for key, value in _backends.load(name).info().items()})
    return facts


def show_versions() -> None:
    """Print versions, usable instruction sets, threads, GPU, driver, compiler, and why a backend is unavailable."""
    facts = versions()
    width = max(map(len, facts))
    for key, value in facts.items():
        print(f"{key:{width}}  {value}")
