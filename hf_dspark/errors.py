"""Errors that have a name of their own, and what a user may lack."""

from importlib.util import find_spec


class CheckpointError(ValueError):
    """A drafter's files cannot be used; the message says which field or tensor, what was expected, and what to do."""


def require_extra(extra: str, *modules: str) -> None:
    """Refuses at once what would fail, after all its work, for want of an optional package.

    Args:
        extra (`str`): the extra of this package that brings the modules.
        modules (`str`): names as they are imported.

    Raises:
        ImportError: one of them is not installed.
    """
    missing = [module for module in modules if find_spec(module) is None]
    if missing:
        raise ImportError(f"this needs {' and '.join(missing)}, which is not installed: in a clone, pip install '.[{extra}]'.")
