"""The decoding loop: prefill, then rounds of draft, schedule, verify, commit, until every row has stopped.

It replaces the body of transformers' `_assisted_decoding` for our drafters, and differs from it where that one is limited
to a single row or looks at stopping criteria only at the end of a block. Rows of a batch accept different numbers of tokens;
each advances at its own pace, and the target's cache takes every token at its own slot (see `cache.py`). The round itself is
in `batch.py`.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.cache_utils import BaseQuantizedLayer, Cache
from transformers.generation.streamers import BaseStreamer
from transformers.generation.utils import GenerateDecoderOnlyOutput
from transformers.utils import logging

from .batch import Batch, Outcome
from .candidate_generator import DSparkCandidateGenerator
from .modeling_dspark import DSparkDraftModel
from .processing import RowProcessors
from .rows import Rows
from .statistics import Round, Statistics
from .target import TargetForward

logger = logging.get_logger(__name__)


@torch.no_grad()
def dspark_decoding(
    target: PreTrainedModel,
    input_ids: Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    synced_gpus: bool = False,
    streamer: BaseStreamer | None = None,
    assistant_model: DSparkDraftModel | None = None,
    **model_kwargs: Any,
) -> Tensor | GenerateDecoderOnlyOutput:
    """Generates with a DSpark drafter; called by `target.generate(..., assistant_model=drafter)` with everything prepared.

    Args:
        target (`PreTrainedModel`): a decoder-only model.
        input_ids (`torch.LongTensor` of shape `(R, S)`): left-padded prompts; empty (S = 0) when `inputs_embeds` is given.
        logits_processor, stopping_criteria, generation_config, synced_gpus, streamer: as `generate` prepared them.
        assistant_model ([`DSparkDraftModel`]): the drafter.
        model_kwargs: `cache`, `attention_mask`, `position_ids`, `inputs_embeds` and whatever else the target's forward takes.

    Returns:
        `torch.LongTensor` of shape `(R, S + new)`, or a `GenerateDecoderOnlyOutput` with `return_dict_in_generate`.

    Raises:
        ValueError: an option cannot be honoured exactly; the message names it.
    """
    started = time.perf_counter()
    drafter = assistant_model
    for unused in ("tokenizer", "assistant_tokenizer", "inputs_tensor"):
        model_kwargs.pop(unused, None)
    refuse_inexact(target, generation_config, synced_gpus, model_kwargs.get("cache"))
    drafter.bind(target)
    warn_of_a_drafter_left_behind(drafter, target)
    statistics = drafter.statistics = Statistics(drafter.config.num_draft_tokens, drafter.device, target.device)
    rows = Rows(input_ids, stopping_criteria, generation_config, streamer)
    processors = RowProcessors(logits_processor, len(input_ids), rows.end_tokens)
    mask, embeds = model_kwargs.get("attention_mask"), model_kwargs.get("inputs_embeds")
    past = model_kwargs["cache"].get_seq_length()
    if mask is None and not hasattr(generation_config, "_mask_length"):  # the host, too, then takes what it is given as new
        given = input_ids if embeds is None else embeds
        generation_config._mask_length = past + given.shape[1]
    elif mask is None and embeds is None and not past:  # token healing may have shortened the prompt since that was noted
        length = generation_config._mask_length = input_ids.shape[1]
        if model_kwargs.get("position_ids") is not None:
            model_kwargs["position_ids"] = model_kwargs["position_ids"][..., -length:]
    columns, shortest = (generation_config._mask_length,) * 2 if mask is None else (mask.shape[1], int(mask.sum(1).min()))
    # Of a cached text only what is new may be among `input_ids`, and nothing of one given as embeddings.
    refuse_changing_rope(target, shortest, rows.max_length + columns - input_ids.shape[1])
    generator = DSparkCandidateGenerator(
        drafter,
        processors,
        do_sample=generation_config.do_sample,
        max_length=rows.max_length,
        max_draft_tokens=generation_config.num_assistant_tokens,
    )
    forward = TargetForward(target, generation_config, generator.captured_states, model_kwargs)
    batch = Batch(forward, generator)

    with statistics.timed("prefill"):
        outcome = batch.prefill(input_ids)
        running = forward.cache_rows
        committed = _commit(rows, outcome, running, forward)
    _report(drafter, rows, running, outcome, committed)

    while rows.active:
        if len(rows.active) < len(forward.cache_rows) and not forward.keeps_rows:
            batch.select_rows([forward.cache_rows.index(row) for row in rows.active])
        running = forward.cache_rows
        sequences = [rows.sequences[row] for row in running]
        limits = [max(0, rows.room(row) - 1) for row in running]  # less the target's own token
        outcome = batch.round(sequences, running, limits)
        committed = _commit(rows, outcome, running, forward)
        generator.book(outcome.lengths, outcome.accepted, committed, [rows.room(row) for row in running])
        _report(drafter, rows, running, outcome, committed)
        if rows.active:
            batch.observe(outcome)

    rows.finish()
    forward.hand_back(rows.padded(), [len(ids) for ids in rows.sequences])
    statistics.close(time.perf_counter() - started)
    return rows.result(forward.user_cache)


def _commit(rows: Rows, outcome: Outcome, running: list[int], forward: TargetForward) -> list[int | None]:
    """Commits what a forward decided; a row that stops inside its block keeps the tokens up to there."""
    rows.record(
        outcome.outputs, running, outcome.slots, outcome.scores, outcome.logits, outcome.accepted, forward.sliding_windows
    )
    return rows.commit(outcome.candidates, outcome.accepted, outcome.following, running)


def _report(drafter: DSparkDraftModel, rows: Rows, running: list[int], outcome: Outcome, committed: list[int | None]) -> None:
    """Tells the drafter's listener, if there is one, what a round brought."""
    if drafter.on_round is None:
        return
    block, lengths = outcome.block, outcome.lengths
    drafted, base = block.tokens.tolist(), None if block.base_tokens is None else block.base_tokens.tolist()
    going = [place for place, new in enumerate(committed) if new is not None]
    drafter.on_round(
        Round(
            rows=[running[place] for place in going],
            drafted=[drafted[place][: lengths[place]] for place in going],
            accepted=[outcome.accepted[place] for place in going],
            committed=[_last(rows.sequences[running[place]], committed[place] or 0) for place in going],
            confidence=None if block.confidence is None else [block.confidence[place].tolist() for place in going],
            base=None if base is None else [base[place][: lengths[place]] for place in going],
            log_odds=None if block.log_odds is None else [block.log_odds[place, : lengths[place]].tolist() for place in going],
        )
    )


def _last(ids: Tensor, count: int) -> list[int]:
    return ids[len(ids) - count :].tolist()


def warn_of_a_drafter_left_behind(drafter: DSparkDraftModel, target: PreTrainedModel) -> None:
    """Says so where a drafter is on the processor and its target is not, which nothing else would tell."""
    if drafter.device.type == "cpu" and target.device.type not in ("cpu", "meta"):
        logger.warning_once(
            f"The drafter is on the processor and its target on {target.device}, which makes every draft slow: move it with "
            "`drafter.to(target.device)`."
        )


def refuse_changing_rope(target: PreTrainedModel, shortest: int, longest: int) -> None:
    """Raises ValueError where the length of a forward decides how tokens are rotated, so that drafts or other rows would.

    Args:
        target (`PreTrainedModel`): with `rope_parameters`, perhaps several by layer type.
        shortest (`int`): tokens of the shortest prompt.
        longest (`int`): tokens that a row may grow to.
    """
    config = target.config.get_text_config(decoder=True)
    rope = getattr(config, "rope_parameters", None) or {}
    for parameters in (rope, *rope.values()):
        kind = parameters.get("rope_type") if isinstance(parameters, dict) else None
        if kind not in ("dynamic", "longrope"):
            continue
        limit = config.max_position_embeddings
        if kind == "longrope":
            limit = parameters.get("original_max_position_embeddings", limit)
        if longest > limit and not (kind == "longrope" and shortest > limit):
            raise ValueError(
                f"the target's {kind!r} rope changes with the length of the text from {limit} tokens on, so that a draft would "
                f"change the tokens before it; prompt and answer may reach {longest}. Keep them within {limit} "
                "(`max_new_tokens`), or generate without `assistant_model`."
            )


def refuse_inexact(target: PreTrainedModel, config: GenerationConfig, synced_gpus: bool, cache: Cache | None) -> None:
    """Raises ValueError for options under which the output could not be the target's own."""
    if target.config.is_encoder_decoder:
        raise ValueError("a DSpark drafter cannot assist an encoder-decoder model: there is no drafter of that kind.")
    if getattr(target.config.get_text_config(decoder=True), "cross_attention_layers", None):
        raise ValueError(
            f"{type(target).__name__} keeps keys of images in its cache, where a drafter expects those of the text: generate "
            "without `assistant_model`."
        )
    if config.assistant_ensemble_weight is not None:
        raise ValueError(
            "`assistant_ensemble_weight` mixes the drafter's distribution into the output, so the text would no longer be the "
            "target's. Leave it out; DSpark is exact."
        )
    if config.guidance_scale not in (None, 1):
        raise ValueError(
            "`guidance_scale` runs a second sequence with its own cache, one token at a time; it cannot be combined with a "
            "DSpark drafter. Leave out `guidance_scale` or `assistant_model`."
        )
    if synced_gpus:
        raise ValueError(
            "`synced_gpus` (FSDP or ZeRO-3 generation) is not supported with a DSpark drafter; gather the parameters or use "
            "device_map."
        )
    if cache is None:
        raise ValueError("a DSpark drafter needs the target's cache; leave `use_cache` at True.")
    foreign = [type(part) for part in (cache, *cache.layers) if not type(part).__module__.startswith("transformers.")]
    if foreign:
        raise ValueError(
            f"`cache` is or holds a {foreign[0].__name__}, a class from outside transformers: what it does to keys and values "
            "would be lost. Pass a DynamicCache, or generate without `assistant_model`."
        )
    if any(isinstance(layer, BaseQuantizedLayer) for layer in cache.layers):
        raise ValueError(
            "a quantised cache cannot take back rejected tokens without losing precision; leave out `cache_implementation` or "
            "generate without `assistant_model`."
        )
