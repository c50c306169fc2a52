"""Exceptions and warnings of spattn."""


class BackendUnavailable(RuntimeError):
    """The named backend cannot run on this machine; the message states what is missing and how to fix it."""


class EfficiencyWarning(UserWarning):
    """A plan computes far more pairs than are allowed, and dense attention is predicted to be faster."""
