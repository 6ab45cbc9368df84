"""What is changed in transformers: two private methods of `GenerationMixin` and one of the attention interface are wrapped.

`_assisted_decoding` is where `generate` ends up when it is given an `assistant_model`; with one of our drafters it runs our
loop, for any batch size. `_get_candidate_generator` is what the host's own loop asks for candidates; with one of our drafters
it gets our generator. Every other assistant goes to the original method, untouched. `AttentionInterface.get_interface` is
where a model fetches its attention function; only inside a forward of packed rows does it return another one. A test pins the
signatures relied on.
"""

from __future__ import annotations

import functools
from typing import Any

from transformers import AttentionInterface, GenerationMixin

from .candidate_generator import DSparkCandidateGenerator
from .decoding import dspark_decoding
from .modeling_dspark import DSparkDraftModel
from .packed_rows import wrap_interface
from .statistics import Statistics

_originals: list[tuple[type, str, Any]] = []


def install() -> None:
    """Makes `generate(assistant_model=…)` know our drafters. Called on `import hf_dspark`; calling it again is harmless."""
    if _originals:
        return
    for owner, name, wrap in (
        (GenerationMixin, "_assisted_decoding", _wrap_decoding),
        (GenerationMixin, "_get_candidate_generator", _wrap_candidates),
        (AttentionInterface, "get_interface", wrap_interface),
    ):
        original = getattr(owner, name)
        _originals.append((owner, name, original))
        setattr(owner, name, wrap(original))


def uninstall() -> None:
    """Puts the library's own methods back. Our drafters can then no longer be passed to `generate`."""
    while _originals:
        setattr(*_originals.pop())


def _wrap_decoding(original: Any) -> Any:
    @functools.wraps(original)  # generate reads the signature
    def _assisted_decoding(self, *args, **kwargs):
        if isinstance(kwargs.get("assistant_model"), DSparkDraftModel):
            return dspark_decoding(self, *args, **kwargs)
        return original(self, *args, **kwargs)

    return _assisted_decoding


def _wrap_candidates(original: Any) -> Any:
    @functools.wraps(original)
    def _get_candidate_generator(self, *args, **kwargs):
        drafter = kwargs.get("assistant_model")
        if not isinstance(drafter, DSparkDraftModel):
            return original(self, *args, **kwargs)
        config = kwargs["generation_config"]
        drafter.bind(self)
        drafter.statistics = Statistics(drafter.config.num_draft_tokens, drafter.device)
        return DSparkCandidateGenerator(
            drafter,
            kwargs["logits_processor"],
            do_sample=config.do_sample,
            max_length=config.max_length,
            max_draft_tokens=config.num_assistant_tokens,
        )

    return _get_candidate_generator
