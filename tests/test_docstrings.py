"""Every public name says what it takes: a docstring with all its arguments, as the API reference shows it."""

import inspect
import re
from dataclasses import is_dataclass
from pathlib import Path
from pydoc import locate

import pytest

import hf_dspark
from hf_dspark import demo, evaluation

REFERENCE = Path(__file__).parents[1] / "docs" / "api.md"
NAMES = re.findall(r"^::: (\S+)$", REFERENCE.read_text(encoding="utf-8"), flags=re.MULTILINE)


def test_the_reference_has_every_exported_name():
    exported = {f"{module.__name__}.{name}" for module in (hf_dspark, evaluation, demo) for name in module.__all__}
    assert exported - set(NAMES) == {"hf_dspark.demo.DRAFTER_FOLDER"}  # a path
    assert len(NAMES) == len(set(NAMES))


def arguments(value):
    """Parameters that a caller gives, without those that the host documents."""
    if inspect.isclass(value) and issubclass(value, Exception):
        return []
    skip = {"self", "cls"}
    names = [name for name in inspect.signature(value).parameters if name not in skip]
    if inspect.isclass(value) and is_dataclass(value) and value.__bases__ != (object,):
        names = [name for name in vars(value).get("__annotations__", {}) if name in names]  # the rest is inherited
    return names


def documented(docstring, section="Args"):
    """Names in a section, `a, b (type): ...` being two."""
    found = re.search(rf"^{section}:\n((?:    .*\n|\n)*)", inspect.cleandoc(docstring) + "\n", flags=re.MULTILINE)
    lines = re.findall(r"^    (\S[^(:]*)(?: \(.*)?", found[1], flags=re.MULTILINE) if found else []
    return {name.strip("`* ") for line in lines for name in line.split(",")}


def check(value):
    docstring = value.__doc__
    assert docstring and docstring.strip(), "no docstring"
    missing = [name for name in arguments(value) if name not in documented(docstring)]
    assert not missing, f"not in Args: {missing}"


def host_has(value, name):
    """Whether a method overrides one of the host's, and is documented there."""
    return any(hasattr(base, name) for base in value.__mro__ if not base.__module__.startswith("hf_dspark"))


@pytest.mark.parametrize("name", NAMES)
def test_arguments_are_documented(name):
    value = locate(name)
    if not callable(value):  # a table of settings
        return
    check(value)
    if inspect.isclass(value):
        for method in vars(value):
            if not method.startswith("_") and inspect.isroutine(getattr(value, method)) and not host_has(value, method):
                check(inspect.unwrap(getattr(value, method)))


def test_the_check_can_fail():
    def takes(one, two):
        """Does something.

        Args:
            one (`int`): a number.
        """

    with pytest.raises(AssertionError, match="two"):
        check(takes)
