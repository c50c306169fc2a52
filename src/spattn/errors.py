"""Exceptions and warnings."""


class BackendUnavailableError(RuntimeError):
    """The requested backend cannot run here; the message names what is missing and the remedy."""


class EfficiencyWarning(UserWarning):
    """The plan computes far more pairs than are allowed, and dense attention is predicted to be faster."""
