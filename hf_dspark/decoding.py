"""The decoding loop: prefill, then rounds of draft, schedule, verify, commit, until every row has stopped.

It replaces the body of transformers' `_assisted_decoding` for our drafters, and differs from it where that one is limited
to a single row or looks at stopping criteria only at the end of a block. Rows of a batch accept different numbers of tokens;
each advances at its own pace, and the target's cache takes every token at its own slot (see `cache.py`).
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

from .candidate_generator import CandidateBlock, DSparkCandidateGenerator
from .modeling_dspark import DSparkDraftModel
from .processing import RowProcessors
from .rows import Rows
from .statistics import Round, Statistics
from .target import TargetForward
from .verification import accept_greedy, accept_sampled


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
    _refuse_inexact(target, generation_config, synced_gpus, model_kwargs.get("cache"))
    drafter.bind(target)
    statistics = drafter.statistics = Statistics(drafter.config.num_draft_tokens, drafter.device)
    processors = RowProcessors(logits_processor, batch_size=len(input_ids))
    rows = Rows(input_ids, stopping_criteria, generation_config, streamer)
    sample = generation_config.do_sample
    generator = DSparkCandidateGenerator(
        drafter,
        processors,
        do_sample=sample,
        max_length=rows.max_length,
        max_draft_tokens=generation_config.num_assistant_tokens,
    )
    forward = TargetForward(target, generation_config, generator.captured_states, model_kwargs)
    empty = input_ids.new_empty(len(input_ids), 0)

    # Prefill: the whole prompt, and the first token from it.
    with statistics.timed("prefill"):
        generator.start(forward.layout, forward.past_length)
        outputs = forward.prefill(input_ids, observe=generator.observe)
        running, nothing = forward.cache_rows, [0] * len(input_ids)
        logits = outputs.logits[:, -1:].to(input_ids.device, torch.float32)
        scores = processors.over_block(logits, rows.sequences, running, empty, nothing)
        slots = [forward.prompt_length - 1] * len(input_ids)
        rows.record(outputs, running, slots, scores, logits, nothing, forward.sliding_windows)
        committed = rows.commit(empty, nothing, _choose(scores[:, 0], sample), running)
    _report(drafter, rows, running, CandidateBlock(empty, torch.zeros(len(running), dtype=torch.long)), nothing, committed)

    while rows.active:
        if len(rows.active) < len(forward.cache_rows) and not forward.keeps_rows:
            left = torch.tensor([forward.cache_rows.index(row) for row in rows.active], device=input_ids.device)
            forward.select_rows(left)
            generator.select_rows(left)
        running = forward.cache_rows
        sequences = [rows.sequences[row] for row in running]
        slots = [len(ids) - 1 + forward.slot_offset for ids in sequences]

        # Draft and schedule. A draft may fill the row up to max_length, less the target's own token.
        limits = [
            max(0, rows.max_length - len(ids) - 1) if row in rows.active else 0
            for row, ids in zip(running, sequences, strict=True)
        ]
        block = generator.propose(sequences, running, slots, limits)
        if block is None:
            block = CandidateBlock(empty[: len(running)], torch.zeros(len(running), dtype=torch.long))

        # Verify.
        lengths, candidates = block.lengths.tolist(), block.tokens.to(input_ids.device)
        anchors = torch.stack([ids[-1] for ids in sequences])[:, None]
        with statistics.timed("verify"):
            outputs = forward.verify(sequences, torch.cat([anchors, candidates], dim=1), slots)
            logits = outputs.logits.to(input_ids.device, torch.float32)
        scores = processors.over_block(logits, sequences, running, candidates, lengths)
        agreed, following = _accept(block, candidates, scores, sample)
        accepted = agreed.tolist()

        # Commit. A row that stops inside its block keeps the tokens up to there.
        rows.record(outputs, running, slots, scores, logits, accepted, forward.sliding_windows)
        committed = rows.commit(candidates, accepted, following, running)
        generator.book(lengths, accepted, committed)
        _report(drafter, rows, running, block, accepted, committed)
        if rows.active:
            generator.observe(outputs.hidden_states, slots, [count + 1 for count in accepted])

    rows.finish()
    forward.hand_back(rows.padded(), [len(ids) for ids in rows.sequences])
    statistics.close(time.perf_counter() - started)
    return rows.result(forward.user_cache)


def _report(
    drafter: DSparkDraftModel,
    rows: Rows,
    running: list[int],
    block: CandidateBlock,
    accepted: list[int],
    committed: list[int | None],
) -> None:
    """Tells the drafter's listener, if there is one, what a round brought."""
    if drafter.on_round is None:
        return
    lengths = block.lengths.tolist()
    drafted, base = block.tokens.tolist(), None if block.base_tokens is None else block.base_tokens.tolist()
    going = [place for place, new in enumerate(committed) if new is not None]
    drafter.on_round(
        Round(
            rows=[running[place] for place in going],
            drafted=[drafted[place][: lengths[place]] for place in going],
            accepted=[accepted[place] for place in going],
            committed=[_last(rows.sequences[running[place]], committed[place] or 0) for place in going],
            confidence=None if block.confidence is None else [block.confidence[place].tolist() for place in going],
            base=None if base is None else [base[place][: lengths[place]] for place in going],
        )
    )


def _last(ids: Tensor, count: int) -> list[int]:
    return ids[len(ids) - count :].tolist()


def _choose(scores: Tensor, sample: bool) -> Tensor:
    """Next tokens `(R,)` from processed scores `(R, V)`, as plain `generate` chooses them."""
    return torch.multinomial(scores.softmax(-1), 1)[:, 0] if sample else scores.argmax(-1)


def _accept(block: CandidateBlock, candidates: Tensor, scores: Tensor, sample: bool) -> tuple[Tensor, Tensor]:
    lengths = block.lengths.to(scores.device)
    if not sample:
        return accept_greedy(candidates, lengths, scores.argmax(-1))
    if candidates.shape[1] == 0:
        return lengths, _choose(scores[:, 0], sample)
    token_ids = None if block.token_ids is None else block.token_ids.to(scores.device)
    return accept_sampled(candidates, lengths, block.logits.to(scores.device), scores, token_ids)


def _refuse_inexact(target: PreTrainedModel, config: GenerationConfig, synced_gpus: bool, cache: Cache | None) -> None:
    """Raises ValueError for options under which the output could not be the target's own."""
    if target.config.is_encoder_decoder:
        raise ValueError("a DSpark drafter cannot assist an encoder-decoder model: there is no drafter of that kind.")
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
    if any(isinstance(layer, BaseQuantizedLayer) for layer in cache.layers):
        raise ValueError(
            "a quantised cache cannot take back rejected tokens without losing precision; leave out `cache_implementation` or "
            "generate without `assistant_model`."
        )
