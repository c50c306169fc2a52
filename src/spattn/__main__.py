"""Entry point of ``python -m spattn``, the same as the command ``spattn``."""

import sys

from .cli import main

if __name__ == "__main__":
    sys.exit(main())
