"""Measuring drafters: speed beside plain decoding, whether the text is the same, and what the confidences are worth."""

from .calibration import Calibration, fit_calibration, set_calibration
from .comparison import Comparison, compare, encode_prompts, first_difference, match_texts, summarise, without_padding
from .pictures import draw_evaluation, draw_simulation
from .reliability import Block, error_by_chance, expected_calibration_error, recorded_blocks, reliability, threshold_sweep
from .rollouts import SETTINGS, evaluate, read_prompt_sets, roll_out

__all__ = [
    "SETTINGS",
    "Block",
    "Calibration",
    "Comparison",
    "compare",
    "draw_evaluation",
    "draw_simulation",
    "encode_prompts",
    "error_by_chance",
    "evaluate",
    "expected_calibration_error",
    "first_difference",
    "fit_calibration",
    "match_texts",
    "read_prompt_sets",
    "recorded_blocks",
    "reliability",
    "roll_out",
    "set_calibration",
    "summarise",
    "threshold_sweep",
    "without_padding",
]
