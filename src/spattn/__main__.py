"""Run ``python -m spattn``, which is the same as the command ``spattn``."""

import sys

from .cli import main

if __name__ == "__main__":
    sys.exit(main())
