"""Plain decoding and DSpark side by side, fairly.

Both run on the same target object, batch by batch, in alternating order, so that a machine that slows down slows both.
Seconds cover the whole call of `generate`, prefill included; what is quoted is the ratio per token, with τ and whether
the texts are the same beside it. A speed-up without that column means nothing.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import BatchEncoding, PreTrainedModel, PreTrainedTokenizerBase

from ..modeling_dspark import DSparkDraftModel
from ..training.data import token_list

NEAR_TIE = 1e-3  # two logits this close can swap places when float32 sums are taken in another order


@dataclass(frozen=True)
class Comparison:
    """One batch of prompts, decoded both ways.

    Args:
        plain_seconds, dspark_seconds (`float`): wall time of the two calls.
        plain_tokens, dspark_tokens (`int`): new tokens, over all rows.
        cycles (`int`): verification forwards of DSpark, summed over rows.
        committed (`int`): tokens that came out of them; the first token of each row comes from the prefill.
        verified, rejected (`int`): draft tokens judged by the target, and those thrown away.
        match (`str`): `"same"`; `"near-tie"`, where texts part because the target itself was undecided, see
            [`match_texts`]; `"differs"`; or `"sampled"` where texts are not meant to agree.
        seconds (`dict[str, float]`): DSpark's time by phase.
    """

    plain_seconds: float
    dspark_seconds: float
    plain_tokens: int
    dspark_tokens: int
    cycles: int
    committed: int
    verified: int
    rejected: int
    match: str
    seconds: dict[str, float]

    @property
    def ratio(self) -> float:
        """Speed over plain decoding, per token: above 1 is faster."""
        return (self.plain_seconds / self.plain_tokens) / (self.dspark_seconds / self.dspark_tokens)

    @property
    def tau(self) -> float:
        """τ: tokens per verification forward and row; 0.0 where there was none."""
        return self.committed / self.cycles if self.cycles else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Fields, ratio and τ as plain numbers, for JSON."""
        return asdict(self) | {"ratio": self.ratio, "tau": self.tau}


def compare(
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    drafter: DSparkDraftModel,
    prompts: Sequence[str | list[dict[str, str]]],
    *,
    batch_size: int = 1,
    seed: int = 0,
    **generate_kwargs: Any,
) -> Iterator[Comparison]:
    """Decodes prompts plainly and with a drafter.

    Args:
        target (`PreTrainedModel`): the target.
        tokenizer (`PreTrainedTokenizerBase`): its tokenizer, with a chat template.
        drafter ([`DSparkDraftModel`]): its drafter.
        prompts (sequence of `str` or `list[dict]`): user turns, or conversations that end with one.
        batch_size (`int`, defaults to 1): prompts per call.
        seed (`int`, defaults to 0): seed set before every call.
        generate_kwargs: for both calls, e.g. `max_new_tokens=128, do_sample=False`.

    Yields:
        [`Comparison`] per batch.
    """
    sample = _setting("do_sample", target, generate_kwargs)
    ends = _setting("eos_token_id", target, generate_kwargs)
    for start in range(0, len(prompts), batch_size):
        inputs = encode_prompts(tokenizer, prompts[start : start + batch_size])
        inputs = inputs.to(target.device)
        outputs: dict[str, list[Tensor]] = {}
        seconds: dict[str, float] = {}
        order = ("plain", "dspark") if (start // batch_size) % 2 == 0 else ("dspark", "plain")
        for method in order:
            torch.manual_seed(seed + start)
            assistant = {"assistant_model": drafter} if method == "dspark" else {}
            started = time.perf_counter()
            ids = target.generate(**inputs, **generate_kwargs, **assistant).cpu()  # .cpu() waits for the device
            seconds[method] = time.perf_counter() - started
            outputs[method] = without_padding(ids, inputs["input_ids"].shape[1], ends)
        counts = drafter.statistics
        matches = {"sampled"}
        if not sample:
            matches = {
                match_texts(target, plain, drafted, mask)
                for plain, drafted, mask in zip(
                    outputs["plain"], outputs["dspark"], inputs["attention_mask"].cpu(), strict=True
                )
            }
        prompt_tokens = inputs["input_ids"].numel()
        yield Comparison(
            plain_seconds=seconds["plain"],
            dspark_seconds=seconds["dspark"],
            plain_tokens=sum(len(ids) for ids in outputs["plain"]) - prompt_tokens,
            dspark_tokens=sum(len(ids) for ids in outputs["dspark"]) - prompt_tokens,
            cycles=counts.cycles,
            committed=counts.tokens,
            verified=counts.verified,
            rejected=counts.rejected,
            match=next(match for match in ("differs", "near-tie", "same", "sampled") if match in matches),
            seconds=dict(counts.seconds),
        )


def _setting(name: str, target: PreTrainedModel, generate_kwargs: dict[str, Any]) -> Any:
    """What `generate` takes an option to be: as given, else by the configuration given, else by the target's own."""
    given = getattr(generate_kwargs.get("generation_config"), name, None)
    return generate_kwargs.get(name, getattr(target.generation_config, name) if given is None else given)


def encode_prompts(
    tokenizer: PreTrainedTokenizerBase, prompts: Sequence[str | list[dict[str, str]]], **chat_template_kwargs: Any
) -> BatchEncoding:
    """Renders prompts as a left-padded batch that waits for the answers.

    Args:
        tokenizer (`PreTrainedTokenizerBase`): with a chat template.
        prompts (sequence of `str` or `list[dict]`): R user turns, or conversations that end with one.
        chat_template_kwargs: of the chat template, e.g. `enable_thinking=False`.

    Returns:
        `BatchEncoding`: `input_ids` and `attention_mask`, `torch.LongTensor`s of shape `(R, P)`.
    """
    texts: Any = (
        tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt,
            add_generation_prompt=True,
            tokenize=False,
            **chat_template_kwargs,
        )
        for prompt in prompts
    )
    return left_padded([tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts], tokenizer.pad_token_id)


def left_padded(rows: list[list[int]], pad_token_id: int | None) -> BatchEncoding:
    """Token ids and mask of rows of any lengths. Many tokenizers of decoders have no pad token; any will do behind a mask."""
    width = max(map(len, rows))
    pad = 0 if pad_token_id is None else pad_token_id
    return BatchEncoding(
        {
            "input_ids": torch.tensor([[pad] * (width - len(row)) + row for row in rows]),
            "attention_mask": torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows]),
        }
    )


def without_padding(ids: Tensor, prompt_length: int, ends: int | list[int] | None) -> list[Tensor]:
    """The rows of an output of `generate`, each up to and including the first token that ended it.

    Args:
        ids (`torch.LongTensor` of shape `(R, S)`): prompts and what followed, on the host.
        prompt_length (`int`): columns of the prompts.
        ends (`int` or `list[int]`, *optional*): tokens that end a text.

    Returns:
        list of R `torch.LongTensor`s, 1-D.
    """
    ended = torch.isin(ids[:, prompt_length:], torch.tensor([] if ends is None else ends, dtype=torch.long))
    lengths = (ended.long().cumsum(1) - ended.long() == 0).sum(1) + prompt_length
    return [row[:length] for row, length in zip(ids, lengths.tolist(), strict=True)]


def first_difference(
    target: PreTrainedModel, plain: Tensor, other: Tensor, attention_mask: Tensor
) -> tuple[int, float, float] | None:
    """Where two greedy texts of one prompt part, and how undecided the target was between them.

    Args:
        target (`PreTrainedModel`): the target.
        plain, other (`torch.LongTensor`, 1-D): the sequences, prompt included; where one is longer, its first further
            token counts as the difference.
        attention_mask (`torch.Tensor`, 1-D): of the prompt.

    Returns:
        `tuple[int, float, float]` or `None`: position of the first different token, the target's best logit there and its
            lead over the lower of the two that the texts have; a text that has ended there has an end token. `None` when
            the texts are the same.
    """
    common = min(len(plain), len(other))
    different = (plain[:common] != other[:common]).nonzero()
    if len(different) == 0 and len(plain) == len(other):
        return None
    at = int(different[0]) if len(different) else common
    prompt_length = len(attention_mask)
    text = torch.cat([plain[:prompt_length][attention_mask.bool()], plain[prompt_length:at]])
    with torch.no_grad():
        logits = target(input_ids=text[None].to(target.device)).logits[0, -1]
    ends = token_list(target.generation_config.eos_token_id)
    chosen = [ids[at : at + 1].tolist() or ends for ids in (plain, other)]
    lowest = min(logits[tokens].float().max().item() if tokens else -math.inf for tokens in chosen)
    best = logits.float().max().item()
    return at, best, best - lowest


def match_texts(
    target: PreTrainedModel, plain: Tensor, drafted: Tensor, attention_mask: Tensor, pad_token_id: int | None = None
) -> str:
    """Compares the greedy texts of one prompt.

    A forward of several tokens rounds differently from one of a single token. Where the logits of both texts' tokens are
    closer to the best than that rounding, either is the target's choice: within 1e-3 in float32, or two units in the last
    place of a shorter dtype.

    Args:
        target (`PreTrainedModel`): the target.
        plain, drafted (`torch.LongTensor`, 1-D): the sequences, prompt included.
        attention_mask (`torch.Tensor`, 1-D): of the prompt.
        pad_token_id (`int`, *optional*): padding behind the texts, which does not count.

    Returns:
        `str`: `"same"`, `"near-tie"` or `"differs"`.
    """
    if pad_token_id is not None:
        plain, drafted = (_strip(ids, len(attention_mask), pad_token_id) for ids in (plain, drafted))
    found = first_difference(target, plain, drafted, attention_mask)
    if found is None:
        return "same"
    _, best, lead = found
    undecided = max(NEAR_TIE, 2 * torch.finfo(target.dtype).eps * abs(best))
    return "near-tie" if lead < undecided else "differs"


def _strip(ids: Tensor, prompt_length: int, pad_token_id: int) -> Tensor:
    """A sequence without the padding at its end."""
    text = (ids[prompt_length:] != pad_token_id).nonzero()
    return ids[: prompt_length + (int(text[-1]) + 1 if len(text) else 0)]


def summarise(comparisons: list[Comparison]) -> dict[str, Any]:
    """Medians and totals of several comparisons, for a table.

    Args:
        comparisons (list of [`Comparison`]): at least one.

    Returns:
        `dict`: `batches`, `ratio_median` (of the batches) and `ratio_total` (of all tokens and seconds), `tau` over all
        cycles, `match` (count of each outcome), `plain_tokens_per_second`, `dspark_tokens_per_second`, `verified`,
        `rejected` and `seconds` by phase.
    """

    def total(name: str) -> Any:
        return sum(getattr(comparison, name) for comparison in comparisons)

    plain_speed = total("plain_tokens") / total("plain_seconds")
    dspark_speed = total("dspark_tokens") / total("dspark_seconds")
    matches = [comparison.match for comparison in comparisons]
    return {
        "batches": len(comparisons),
        "ratio_median": statistics.median(comparison.ratio for comparison in comparisons),
        "ratio_total": dspark_speed / plain_speed,
        "tau": total("committed") / max(total("cycles"), 1),
        "match": {name: matches.count(name) for name in dict.fromkeys(matches)},
        "plain_tokens_per_second": plain_speed,
        "dspark_tokens_per_second": dspark_speed,
        "verified": total("verified"),
        "rejected": total("rejected"),
        "seconds": {phase: sum(c.seconds[phase] for c in comparisons) for phase in comparisons[0].seconds},
    }
