"""Errors that have a name of their own."""


class CheckpointError(ValueError):
    """A drafter's files cannot be used; the message says which field or tensor, what was expected, and what to do."""
