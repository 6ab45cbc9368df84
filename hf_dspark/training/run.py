"""One function from files to a trained drafter; `hf-dspark train` is its command line."""

from __future__ import annotations

import copy
import hashlib
import json
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Subset
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase, set_seed
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import IntervalStrategy
from transformers.utils import logging

from ..configuration_dspark import DSparkConfig
from ..evaluation.calibration import set_calibration
from ..formats.files import CONFIG_NAME
from ..modeling_dspark import DSparkDraftModel
from .data import most_used_tokens, read_examples, token_list
from .initialization import config_for_target, start_drafter
from .state_cache import cache_target_states
from .trainer import DSparkTrainer, DSparkTrainingArguments, place_target

logger = logging.get_logger(__name__)


def train_drafter(
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    data: Iterable[str | Path],
    args: DSparkTrainingArguments,
    *,
    mask_token_id: int | None = None,
    drafter: DSparkDraftModel | None = None,
    max_sequence_length: int = 1024,
    validation_examples: int = 32,
    chat_template_kwargs: dict | None = None,
    start: bool = True,
    cache_folder: str | Path | None = None,
    resume: bool = False,
    **config_overrides: Any,
) -> tuple[DSparkDraftModel, DSparkTrainer]:
    """Trains a drafter on answers of its target and saves it to `args.output_dir`.

    Args:
        target (`PreTrainedModel`): the target, which is frozen.
        tokenizer (`PreTrainedTokenizerBase`): the target's.
        data (iterable of paths): JSONL files or data sets of conversations, see
            [`~hf_dspark.training.data.read_records`].
        args ([`DSparkTrainingArguments`]): settings of the run.
        mask_token_id (`int`, *optional*): an unused token; looked for among the tokenizer's special tokens when not
            given.
        drafter ([`DSparkDraftModel`], *optional*): one to go on from instead of a new one.
        max_sequence_length (`int`, defaults to 1024): tokens per conversation.
        validation_examples (`int`, defaults to 32): conversations set aside, or a tenth of all where that is less; more
            where a prompt, which goes with all of its answers, has many. Where that leaves none, nothing is evaluated.
        chat_template_kwargs (`dict`, *optional*): passed to the chat template.
        start (`bool`, defaults to `True`): whether a new drafter starts from the target's weights, from which token
            follows which in the answers, and from least squares on the target's states, see
            [`~hf_dspark.training.initialization`].
        cache_folder (`str` or `Path`, *optional*): where to keep the target's states, so that the target runs once over
            the text instead of in every step; see [`~hf_dspark.training.state_cache`] for what that takes on disk.
        resume (`bool`, defaults to `False`): go on from the last checkpoint in `args.output_dir`, if there is one; the
            drafter then is the checkpoint's.
        config_overrides: fields of [`DSparkConfig`] for a new drafter, e.g. `num_hidden_layers=2,
        draft_vocab_size=8192`.

    Returns:
        `tuple[DSparkDraftModel, DSparkTrainer]`: the drafter, in evaluation mode, and what trained it.

    Raises:
        ValueError: no mask token can be found or the one given occurs in the text, the data is not usable, or the folder holds
            checkpoints and `resume` is not given.
        FloatingPointError: the loss or a gradient was not finite, or the loss was far above the usual.
    """
    checkpoint = last_checkpoint(args.output_dir)
    if checkpoint is not None and not resume:  # it might have more steps than this run ever gets, and be taken for the last
        raise ValueError(
            f"{args.output_dir} holds checkpoints of an earlier run ({Path(checkpoint).name}). Pass `resume` (--resume) to go "
            "on from there, or name another folder."
        )
    place_target(target, args)
    set_seed(args.seed)
    examples = [
        example for path in data for example in read_examples(path, tokenizer, max_sequence_length, chat_template_kwargs)
    ]
    order = torch.randperm(len(examples), generator=torch.Generator().manual_seed(args.seed)).tolist()
    apart = _held_out_prompts(examples, min(validation_examples, len(examples) // 10), args.seed)
    examples = sorted((examples[i] for i in order), key=lambda example: _prompt_of(example) in apart)
    split = sum(_prompt_of(example) not in apart for example in examples)
    if len(examples) - split > 2 * validation_examples:
        logger.warning(
            f"{len(examples) - split} of {len(examples)} conversations are set aside, not {validation_examples}: a prompt goes "
            "with all of its answers, and some have many. More prompts with fewer answers each teach more."
        )
    if not apart:
        args = copy.copy(args)
        args.eval_strategy = IntervalStrategy.NO

    if checkpoint is not None:
        # Shape, mask token and draft vocabulary of the run so far, even if the data has changed since.
        drafter = DSparkDraftModel.from_pretrained(checkpoint)
        output = Path(args.output_dir)
        if (output / CONFIG_NAME).is_file() and DSparkConfig.from_pretrained(output).is_calibrated:
            logger.warning("What was calibrated since the last checkpoint is dropped: calibrate the drafter again.")
        drafter.take_profile_of(output)  # it may have been measured since
    new = drafter is None
    if drafter is not None:
        drafter.float()  # as files are, small steps would be rounded away; `bf16` and `fp16` of the arguments save time
        if drafter.config.is_calibrated:
            logger.warning("The calibration of this drafter will not hold after training and is dropped: calibrate it again.")
            set_calibration(drafter)
    if drafter is None:
        mask_token_id = _mask_token(mask_token_id, tokenizer, examples, target.config.get_text_config(decoder=True))
        drafter = DSparkDraftModel(config_for_target(target, mask_token_id, **config_overrides))
        if drafter.config.draft_vocab_size is not None:
            always = token_list(drafter.config.eos_token_id)
            drafter.set_draft_vocabulary(most_used_tokens(examples[:split], drafter.config.draft_vocab_size, always))
    dataset: Any = examples
    if cache_folder is not None:
        dataset = cache_target_states(target, examples, drafter.config.target_layer_ids, cache_folder)
    training: Any = Subset(dataset, range(split))
    validation = Subset(dataset, range(split, len(examples)))
    if new and start:
        start_drafter(drafter, target, training)
    trainer = DSparkTrainer(
        drafter, target, args, train_dataset=training, eval_dataset=validation if apart else None, processing_class=tokenizer
    )
    trainer.train(resume_from_checkpoint=checkpoint)
    trainer.save_model()
    return drafter.eval(), trainer


def _prompt_of(example: dict[str, Any]) -> tuple[int, ...]:
    return tuple(example["input_ids"][: example["prompt_length"]])


def _held_out_prompts(examples: list[dict[str, Any]], count: int, seed: int) -> set[tuple[int, ...]]:
    """Prompts that have `count` answers together, or a few more.

    They are chosen by a hash: when text is added and the run resumed, none that was trained on gets among them (as long as
    `count` stays what it was).
    """
    answers = Counter(map(_prompt_of, examples))
    chosen: set[tuple[int, ...]] = set()
    for prompt in sorted(answers, key=lambda prompt: hashlib.sha256(json.dumps([seed, prompt]).encode()).digest()):
        if sum(answers[one] for one in chosen) >= count or len(chosen) == len(answers) - 1:
            break
        chosen.add(prompt)
    return chosen


def last_checkpoint(folder: str | Path) -> str | None:
    """The newest complete checkpoint of a run, or `None`. A process killed in writing leaves an incomplete one."""
    # The state of the trainer is the last file of a checkpoint to be written.
    found = [path.parent for path in Path(folder).glob(f"checkpoint-*/{TRAINER_STATE_NAME}")]
    steps = {int(number): path for path in found if (number := path.name.removeprefix("checkpoint-")).isdecimal()}
    return str(steps[max(steps)]) if steps else None


def find_mask_token(tokenizer: PreTrainedTokenizerBase, examples: Iterable[dict[str, Any]], config: PreTrainedConfig) -> int:
    """An added special token that no example uses and that is neither unknown, pad, bos nor eos.

    Args:
        tokenizer (`PreTrainedTokenizerBase`): the target's.
        examples (iterable of `dict`): from [`~hf_dspark.training.data.read_examples`].
        config (`PreTrainedConfig`): of the target's text model: its vocabulary size and special tokens.

    Returns:
        `int`: the highest such token.

    Raises:
        ValueError: there is none.
    """
    taken = {token for example in examples for token in example["input_ids"]}
    for source in (tokenizer, config):
        for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
            taken.update(token_list(getattr(source, name, None)))
    taken.add(tokenizer.unk_token_id)
    for token, added in sorted(tokenizer.added_tokens_decoder.items(), reverse=True):
        if added.special and token not in taken and token < config.vocab_size:
            return token
    raise ValueError(
        "no unused special token found to serve as mask token; name one with `mask_token_id` (--mask-token-id): a "
        "token that never occurs in your text and is not pad, bos or eos."
    )


def _mask_token(
    wanted: int | None,
    tokenizer: PreTrainedTokenizerBase,
    examples: list[dict[str, Any]],
    config: PreTrainedConfig,
) -> int:
    """The mask token asked for, if no text contains it, else one that is found."""
    if wanted is None:
        return find_mask_token(tokenizer, examples, config)
    if any(wanted in example["input_ids"] for example in examples):
        raise ValueError(
            f"`mask_token_id` {wanted} ({tokenizer.decode([wanted])!r}) occurs in the training text: the drafter would "
            "take it for a slot to fill. Name a token that never occurs, or none to have one found."
        )
    return wanted
