"""Compute capability 10.x, which runs the portable kernels.

Kernels for tcgen05 are to be a :class:`~spattn.cuda.host.family.Family` here, with an entry in
:mod:`spattn.cuda.families`.
"""

from __future__ import annotations

from ..driver.device import Device

__all__ = ["missing"]


def missing(device: Device) -> str | None:
    """Return which kernels a device of this generation lacks; None for other devices."""
    if device.capability[0] != 10:
        return None
    return "no kernels for compute capability 10.x yet: the portable kernels run"
