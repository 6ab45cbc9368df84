"""Docstrings as transformers writes them, turned into Markdown for the API reference.

Sections (`Args:`, `Returns:`, ...) become headings with lists, and [`name`] becomes a link where api.md shows that name.
"""

import re
from pathlib import Path

from griffe import Extension

SECTION = re.compile(r"(Args|Attributes|Returns|Yields|Raises):$")
ITEM = re.compile(r"    (\S[^(:]*?)( \(.*|: .*|:)$")
LINK = re.compile(r"\[`~?([\w.]+)`\]")


class HostDocstrings(Extension):
    def __init__(self) -> None:
        text = Path(__file__).with_name("api.md").read_text(encoding="utf-8")
        self.known = {name.rpartition(".")[2]: name for name in re.findall(r"^::: (\S+)", text, flags=re.MULTILINE)}

    def on_object(self, *, obj, loader, **kwargs) -> None:
        if obj.docstring:
            obj.docstring.value = self.linked(as_markdown(obj.docstring.value))

    def linked(self, text: str) -> str:
        def link(found: re.Match) -> str:
            name = found[1].rpartition(".")[2]
            return f"[`{name}`][{self.known[name]}]" if name in self.known else f"`{name}`"

        return LINK.sub(link, text)


def as_markdown(text: str) -> str:
    """One docstring. Items of `Returns` and `Yields` are prose, those of the other sections a list."""
    lines, section = [], None
    for line in text.splitlines():
        if found := SECTION.match(line):
            section = found[1]
            lines += ["", f"**{'Arguments' if section == 'Args' else section}**", ""]
        elif line and not line.startswith(" "):
            section = None
            lines.append(line)
        elif section in ("Returns", "Yields"):
            lines.append(line.strip())
        elif section and (found := ITEM.match(line)):
            names = ", ".join(f"`{name}`" for name in found[1].split(", "))
            lines.append(f"- {names}{found[2]}")
        elif section:
            lines.append(f"    {line.strip()}" if line.strip() else "")
        else:
            lines.append(line)
    return "\n".join(lines)
