"""A dictionary that stays small."""

from __future__ import annotations

from typing import Any

__all__ = ["Recent"]


class Recent(dict[Any, Any]):
    """What can be made again, for at most `most` keys: it forgets everything when it is full."""

    def __init__(self, most: int):
        super().__init__()
        self.most = most

    def keep(self, key: Any, value: Any) -> Any:
        """Keeps a value; returns the one that was there first."""
        if len(self) >= self.most:
            self.clear()
        return self.setdefault(key, value)
