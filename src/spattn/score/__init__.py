"""Score functions, ``(score, b, h, q, k) -> score``: a library, and how to write your own.

``attention(q, k, v, pattern, score=function)`` calls the function once with symbols, differentiates the recorded
operations, and fuses function and derivatives into its kernels. For each allowed pair, the function gets:

- ``score``, the scaled product of query and key;
- ``b`` and ``h``, the indices of the batch entry and of the query head;
- ``q`` and ``k``, the positions of query and key: the last query has the position of the last key.

It may use arithmetic, comparisons, ``&``, ``|`` and ``~``, functions of NumPy, PyTorch or this module, and look up
elements of arrays in its variables by integer indices. Captured numbers and arrays are read at each call; arrays of
floats get gradients. :func:`from_score_mod` runs the functions of FlexAttention, and :func:`show` prints what kernels
compute.
"""

import functools
import importlib
import pkgutil
from typing import TYPE_CHECKING, Any

from .._util.imports import whole_imports

if TYPE_CHECKING:
    from .composition import ScoreFunction as ScoreFunction
    from .composition import compose as compose
    from .functions import clip as clip
    from .functions import exp as exp
    from .functions import log as log
    from .functions import maximum as maximum
    from .functions import minimum as minimum
    from .functions import sigmoid as sigmoid
    from .functions import sqrt as sqrt
    from .functions import take as take
    from .functions import tanh as tanh
    from .functions import where as where
    from .inspection import captured as captured
    from .inspection import show as show
    from .library.alibi import alibi as alibi
    from .library.alibi import alibi_slopes as alibi_slopes
    from .library.bias import bias as bias
    from .library.from_score_mod import from_score_mod as from_score_mod
    from .library.natten_rpb import natten_rpb as natten_rpb
    from .library.relative_bias import relative_bias as relative_bias
    from .library.softcap import softcap as softcap
    from .library.swin_bias import swin_bias as swin_bias
    from .library.t5_bias import t5_bias as t5_bias
    from .library.temperature import temperature as temperature

_MODULES = ("composition", "functions", "inspection")  # and those of library/


@functools.cache
def _public() -> dict[str, Any]:
    """Every public name; a file in ``library/`` adds those of its ``__all__``."""
    library = importlib.import_module(f"{__name__}.library")
    found = sorted(module.name for module in pkgutil.iter_modules(library.__path__) if module.name[0] != "_")
    modules = [importlib.import_module(f"{__name__}.{name}") for name in _MODULES]
    modules += [importlib.import_module(f"{__name__}.library.{name}") for name in found]
    return {name: getattr(module, name) for module in modules for name in module.__all__}


def __getattr__(name: str) -> Any:
    """Import the library on first access, so that ``import spattn`` stays fast."""
    with whole_imports:
        public = _public()
        if name == "__all__":
            return sorted(public)
        if name not in public:
            from .._util.renamed import unknown

            raise unknown(__name__, name)
    return public[name]


def __dir__() -> list[str]:
    return sorted({*globals(), *_public()})
