"""``python examples/sentence_encoder`` and, inside ``examples/``, ``python -m sentence_encoder``."""

import os
import sys
from pathlib import Path

# Both libraries let idle threads spin, which costs each other's calls and other programs a core. Read when they load.
os.environ.setdefault("OPENBLAS_THREAD_TIMEOUT", "16")  # 2**16 cycles instead of 2**26
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from sentence_encoder.command import main  # noqa: E402

sys.exit(main())
