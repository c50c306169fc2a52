"""Errors of spattn's own."""


class BackendUnavailable(RuntimeError):
    """A backend was asked for by name and cannot run here; the message says what is missing and what fixes it."""
