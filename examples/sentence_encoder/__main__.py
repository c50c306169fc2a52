"""``python examples/sentence_encoder`` and, inside ``examples/``, ``python -m sentence_encoder``."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from sentence_encoder.others import set_up_threads  # noqa: E402

set_up_threads()  # before NumPy and spattn are imported

from sentence_encoder.command import main  # noqa: E402

sys.exit(main())
