"""Every public name says what it takes: a docstring with all its arguments, as the API reference shows it."""

import importlib
import inspect
import pkgutil
import re
from dataclasses import is_dataclass

import pytest

import hf_dspark
from hf_dspark import answering, card, demo, evaluation, loading, scheduling, training
from hf_dspark.demo import show
from hf_dspark.formats import export, inspection


def defined_in(module):
    """Names of the functions and classes that a module defines and does not hide."""
    return [
        name
        for name, value in vars(module).items()
        if not name.startswith("_") and getattr(value, "__module__", None) == module.__name__ and callable(value)
    ]


def exported():
    modules = [hf_dspark, evaluation, demo]
    modules += [importlib.import_module(found.name) for found in pkgutil.iter_modules(training.__path__, "hf_dspark.training.")]
    modules += [scheduling, loading, card, answering, show, export, inspection]
    for module in modules:
        for name in getattr(module, "__all__", None) or defined_in(module):
            value = getattr(module, name)
            if callable(value):
                yield pytest.param(value, id=f"{module.__name__}.{name}")


def arguments(value):
    """Parameters that a caller gives, without those that the host documents."""
    skip = {"self", "cls", "model_args"}
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


@pytest.mark.parametrize("value", list(exported()))
def test_arguments_are_documented(value):
    check(value)
    if inspect.isclass(value):
        for name, method in vars(value).items():
            if not name.startswith("_") and (inspect.isfunction(method) or isinstance(method, (classmethod, staticmethod))):
                function = inspect.unwrap(getattr(value, name))
                if function.__doc__ is not None or len(value.__mro__) == 2:  # else it overrides the host's, as documented there
                    check(function)


def test_the_check_can_fail():
    def takes(one, two):
        """Does something.

        Args:
            one (`int`): a number.
        """

    with pytest.raises(AssertionError, match="two"):
        check(takes)
