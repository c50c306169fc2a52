"""Attacks of outside reviewers; no expected value is computed by spattn."""
