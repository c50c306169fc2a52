"""Compute capability 10.0 and later, which run the portable kernels.

Kernels for tcgen05 would be a :class:`~spattn.cuda.host.family.Family` in this package, listed in
:mod:`spattn.cuda.families`.
"""

from __future__ import annotations

from ..driver.device import Device

__all__ = ["missing"]


def missing(device: Device) -> str | None:
    """Return which kernels a device of these generations lacks; None for other devices."""
    major = device.capability[0]
    return f"no kernels for compute capability {major}.x yet: the portable kernels run" if major >= 10 else None
