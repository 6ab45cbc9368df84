"""Command lines as they stand in texts, parsed by the real program without being run."""

import shlex

import typer

from hf_dspark import cli


def joined_lines(text: str) -> list[str]:
    """The commands of a shell block or a help text; a line that ends in a backslash goes on, comments are left out."""
    lines = [line.strip() for line in text.replace("\\\n", " ").splitlines()]
    return [line for line in lines if line and not line.startswith("#")]


def parse(line: str) -> str:
    """Parses an `hf-dspark` command; returns its name. A wrong name, option or value raises as it would in use."""
    program, name, *arguments = (word for word in shlex.split(line, comments=True) if word != "--debug")
    assert program == "hf-dspark", line
    if "--help" not in arguments:
        typer.main.get_command(cli.app).commands[name].make_context(name, arguments)
    return name
