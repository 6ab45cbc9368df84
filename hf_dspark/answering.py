"""One answer as it streams, what it took, and plain decoding behind it to compare with."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TextStreamer

from .evaluation.comparison import encode_prompts, left_padded, match_texts
from .modeling_dspark import DSparkDraftModel


def answer_prompt(
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    drafter: DSparkDraftModel,
    prompt: str,
    *,
    raw: bool = False,
    plain: bool = False,
    stream: bool = True,
    seed: int = 0,
    **generate_kwargs: Any,
) -> dict[str, Any]:
    """Answers one prompt with a drafter, and once more without when asked to.

    A comparison begins with a few tokens of each, unseen, so that neither pays for being the first. One run is no measurement:
    [`~hf_dspark.evaluation.compare`] alternates.

    Args:
        target (`PreTrainedModel`): the target.
        tokenizer (`PreTrainedTokenizerBase`): its tokenizer.
        drafter ([`DSparkDraftModel`]): its drafter.
        prompt (`str`): a user's turn, or with `raw` a text to go on with.
        raw (`bool`, defaults to `False`): take the text as it stands, without the chat template.
        plain (`bool`, defaults to `False`): also decode without the drafter.
        stream (`bool`, defaults to `True`): print the text as it comes; with `plain`, both texts under a heading.
        seed (`int`, defaults to 0): set before each of the two.
        generate_kwargs: of `generate`, e.g. `max_new_tokens=128, do_sample=False`.

    Returns:
        `dict`: `text`, `tokens` (new ones), `seconds` (of the whole call), `tokens_per_second`, `tau`, `verified` and
        `rejected`; with `plain` also `plain`, the first four of the other run, and `match`, see
        [`~hf_dspark.evaluation.match_texts`], or `"sampled"`. All of it fits into JSON.

    Raises:
        ValueError: the prompt is empty, or the tokenizer has no chat template and `raw` was not asked for.
    """
    if not prompt.strip():
        raise ValueError("the prompt is empty. Give a text to answer.")
    if raw:
        inputs = left_padded([tokenizer(prompt)["input_ids"]], None)
    elif tokenizer.chat_template is None:
        raise ValueError("the tokenizer has no chat template, so a turn cannot be written. Pass the text as is: `raw` (--raw).")
    else:
        inputs = encode_prompts(tokenizer, [prompt])
    inputs = inputs.to(target.device)

    def run(heading: str, **assistant: Any) -> tuple[Tensor, dict[str, Any]]:
        if stream and plain:
            print(f"{heading}:")
        streamer = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True) if stream else None
        torch.manual_seed(seed)
        started = time.perf_counter()
        ids = target.generate(**inputs, **generate_kwargs, **assistant, streamer=streamer)[0].cpu()  # waits for the device
        seconds = time.perf_counter() - started
        new = ids[inputs["input_ids"].shape[1] :]
        text = tokenizer.decode(new, skip_special_tokens=True)
        return ids, {"text": text, "tokens": len(new), "seconds": seconds, "tokens_per_second": len(new) / seconds}

    if plain:
        few = generate_kwargs | {"max_new_tokens": 2 + drafter.config.num_draft_tokens}
        for assistant in ({"assistant_model": drafter}, {}):
            target.generate(**inputs, **few, **assistant)
    ids, report = run("DSpark", assistant_model=drafter)
    counts = drafter.statistics
    report |= {"tau": counts.tau, "verified": counts.verified, "rejected": counts.rejected}
    if plain:
        plain_ids, report["plain"] = run("plain")
        sampled = generate_kwargs.get("do_sample", target.generation_config.do_sample)
        mask = inputs["attention_mask"][0].cpu()
        report["match"] = "sampled" if sampled else match_texts(target, plain_ids, ids, mask)
    return report
