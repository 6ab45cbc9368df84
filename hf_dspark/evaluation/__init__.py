"""Measuring drafters: speed beside plain decoding, and whether the text is the same."""

from .comparison import Comparison, compare, first_difference, match_texts, summarise

__all__ = ["Comparison", "compare", "first_difference", "match_texts", "summarise"]
