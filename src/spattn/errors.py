"""Exceptions and warnings."""


class BackendUnavailableError(RuntimeError):
    """The requested backend cannot run here; the message says what is missing and how to fix it."""


class EfficiencyWarning(UserWarning):
    """The plan computes far more pairs than the pattern allows, and dense attention is predicted to be faster."""


class PlanningWarning(UserWarning):
    """Planning took more than a second, or far longer than the call; the message says why and what to do."""
