"""Errors and warnings of spattn's own."""


class BackendUnavailable(RuntimeError):
    """A backend was asked for by name and cannot run here; the message says what is missing and what fixes it."""


class EfficiencyWarning(UserWarning):
    """A plan computes far more pairs than are allowed, and attention over all pairs is predicted to take less time."""
