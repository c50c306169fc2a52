"""Compute capability 10.x: no kernels of its own yet.

The portable kernels run there. Kernels for tcgen05 are a :class:`~spattn.cuda.host.family.Family` here, and an entry in
:mod:`spattn.cuda.families`.
"""

from __future__ import annotations

from ..driver.device import Device

__all__ = ["missing"]


def missing(device: Device) -> str | None:
    """What a device of this generation does without; None for other devices."""
    if device.capability[0] != 10:
        return None
    return "no kernels for compute capability 10.x yet: the portable kernels run"
