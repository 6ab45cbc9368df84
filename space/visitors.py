"""Visitors: when they stop or leave, and what they may type.

Their text is read as text and nothing else: never executed, never kept, never shown unescaped.
"""

from __future__ import annotations

import html
import re
import unicodedata
from collections.abc import Generator, Iterator
from contextlib import closing
from typing import TypeVar

from transformers import PreTrainedTokenizerBase

PROMPT_LIMIT = 600  # characters
TOKEN_LIMIT = 40  # characters of what is typed into the table of habits

T = TypeVar("T")
_TAG = re.compile(r"</?[a-zA-Z!][^<>]*>")
# These turn the direction of the text around them, in the page as well.
_TURNING = {*range(0x202A, 0x202F), *range(0x2066, 0x206A)}


class Refused(Exception):
    """A visitor does not get what was asked for; the message says why, in plain words."""

    kind = "refusal"


class Stopped(Refused):
    """As the visitor wished."""

    kind = "note"


class Visitor:
    """What an open page has clicked last, in seconds by its own clock: clicks may overtake each other on their way here."""

    def __init__(self) -> None:
        self.started = self.stopped = 0.0

    def start(self, clicked: float) -> None:
        """Start was clicked: what was clicked before is over, even if this click is refused."""
        self.started = max(self.started, clicked)

    def watch(self, clicked: float, states: Generator[T]) -> Iterator[T]:
        """Passes on what a click of Start, told to [`start`], has set going, until it ends or another click ends it.

        Args:
            clicked (`float`): when.
            states (generator): closed at the end, whatever ends it.

        Raises:
            Stopped: it was a click of Stop.
        """
        with closing(states):
            for state in states:
                if self.started > clicked:
                    return
                if self.stopped > clicked:
                    raise Stopped("Stopped.")
                yield state


def check_text(text: str | None, tokenizer: PreTrainedTokenizerBase, limit: int = PROMPT_LIMIT) -> tuple[str, str]:
    """Accepts a visitor's text or refuses it.

    Args:
        text (`str`, *optional*): as typed.
        tokenizer (`PreTrainedTokenizerBase`): its control words, such as `<|im_end|>`, are refused: typed into a prompt they
            would end the turn.
        limit (`int`): longest text, in characters.

    Returns:
        `tuple[str, str]`: the text, and a note for the visitor, empty if there is nothing to say.

    Raises:
        Refused: the text is empty, too long, or holds a control character or a control word.
    """
    text = (text or "").replace("\r\n", "\n")
    if not text.strip():
        raise Refused("Nothing typed yet: please write something first.")
    if len(text) > limit:
        raise Refused(f"That is {len(text):,} characters. Please keep it to {limit}.")
    for character in text:
        control = unicodedata.category(character) in ("Cc", "Cs") and character not in "\n\t"
        if control or ord(character) in _TURNING:
            raise Refused(f"The text holds an invisible control character (U+{ord(character):04X}). Please remove it.")
    added = (token.content for token in tokenizer.added_tokens_decoder.values() if token.special)
    for word in {*tokenizer.all_special_tokens, *added}:
        if word in text:
            raise Refused(f"“{word}” is a control word of this model. Please leave it out.")
    if _TAG.search(text):
        return text, "Your text holds HTML. It is read and shown as plain text; nothing in it is executed."
    return text, ""


def escape(text: str) -> str:
    """Any text, from a visitor or from a model, made safe inside HTML; control characters become visible."""
    cleaned = "".join("\ufffd" if unicodedata.category(c) == "Cc" and c not in "\n\t" else c for c in text)
    return html.escape(cleaned)


def notice(message: str, kind: str = "note") -> str:
    """A line to the visitor; `kind` is `"note"` or `"refusal"`."""
    if not message:
        return ""
    role = "alert" if kind == "refusal" else "status"
    return f'<p class="notice {kind}" role="{role}">{escape(message)}</p>'
