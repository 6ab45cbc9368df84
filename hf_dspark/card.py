"""The model card of a drafter: what it is, what it was measured to do, how to use it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from huggingface_hub import EvalResult, ModelCard, ModelCardData

from .modeling_dspark import DSparkDraftModel


def model_card(
    drafter: DSparkDraftModel,
    name: str,
    base_model: str,
    *,
    results: Sequence[dict[str, Any]] = (),
    license: str | None = None,
    datasets: Sequence[str] = (),
    notes: str = "",
) -> ModelCard:
    """Writes a card from the drafter itself and from what was measured; nothing in it is made up.

    Args:
        drafter ([`DSparkDraftModel`]): the drafter, with the load profile and calibration it is published with.
        name (`str`): title, and the repo id where it has one.
        base_model (`str`): repo id of the target.
        results (sequence of `dict`): rows of [`~hf_dspark.evaluation.evaluate`].
        license (`str`, *optional*): identifier as the Hub knows it, e.g. `"apache-2.0"`.
        datasets (sequence of `str`): repo ids of the training prompts.
        notes (`str`): Markdown to put before the limits: how it was trained, on what, for how long.

    Returns:
        `ModelCard`: its `save(path)` writes the file, its `data.eval_results` hold the accepted lengths.
    """
    config = drafter.config
    parameters = sum(parameter.numel() for parameter in drafter.parameters())
    measured = [row for row in results if row["prompts"] != "all"]
    data = ModelCardData(
        language=None,
        license=license,
        library_name="transformers",
        base_model=base_model,
        pipeline_tag="text-generation",
        tags=["speculative-decoding", "dspark", "draft-model"],
        datasets=list(datasets) or None,
        model_name=name,
        eval_results=[
            EvalResult(
                task_type="text-generation",
                dataset_type=row["prompts"],
                dataset_name=row["prompts"],
                dataset_config=row["setting"],  # or the Hub takes both settings for one result
                metric_type="accepted_length",
                metric_value=round(row["tau"], 3),
            )
            for row in measured
        ]
        or None,
    )
    head = "no sequential head"
    if config.markov_rank:
        head = f"a {config.markov_head_type} sequential head of rank {config.markov_rank}"
    vocabulary = "" if config.draft_vocab_size is None else f", a draft vocabulary of {config.draft_vocab_size:,} tokens"
    confidence = "a confidence head" if config.enable_confidence_head else "no confidence head"
    parts = [
        f"---\n{data.to_yaml()}\n---",
        f"# {name}",
        f"A DSpark drafter for [{base_model}](https://huggingface.co/{base_model}): {config.num_hidden_layers} layers, drafts "
        f"of {config.num_draft_tokens} tokens, {head}, {confidence}{vocabulary}. {parameters / 1e6:.1f} million parameters of "
        "its own; embedding and LM head are the target's. With it the target writes the same text, sooner.",
        "## Use",
        f"```python\nfrom hf_dspark import DSparkDraftModel\nfrom transformers import AutoModelForCausalLM\n\n"
        f'target = AutoModelForCausalLM.from_pretrained("{base_model}", dtype="auto")\n'
        f'drafter = DSparkDraftModel.from_pretrained("{name}", dtype=target.dtype)\n'
        "output = target.generate(**inputs, assistant_model=drafter)\n```",
        "To serve it with vLLM, write it in the form that engine reads: "
        f"`hf-dspark convert {name} out --to speculators --target {base_model}`, then `vllm serve out`.",
    ]
    if results:
        parts += ["## Measured", _table(results, config.num_draft_tokens)]
    parts += ["## Confidences and load", _scheduling(drafter)]
    if notes:
        parts.append(notes.strip())
    parts += [
        "## Limits",
        f"Made for {base_model} and the text it was trained on. With another target, another chat template or another "
        "thinking mode the text stays right, and drafts are rejected. Greedy text equals plain decoding in float32; in shorter "
        "dtypes it is the target's up to its own numerics.",
    ]
    return ModelCard("\n\n".join(parts) + "\n")


def _table(results: Sequence[dict[str, Any]], count: int) -> str:
    """Accepted length and acceptance by position, a line per setting and set of prompts."""
    positions = " | ".join(str(position) for position in range(1, count + 1))
    lines = [f"| decoding | prompts | τ | {positions} |", "|---" * (3 + count) + "|"]
    for row in results:
        rates = ["–" if entry["conditional"] is None else f"{entry['conditional']:.2f}" for entry in row["reliability"]]
        lines.append(f"| {row['setting']} | {row['prompts']} | {row['tau']:.2f} | " + " | ".join(rates) + " |")
    return (
        "Real rollouts, every draft verified to its end: τ is tokens per forward of the target, the columns are acceptance at "
        "each position given that all before it was accepted.\n\n" + "\n".join(lines)
    )


def _scheduling(drafter: DSparkDraftModel) -> str:
    config = drafter.config
    calibrated = "The confidences are as trained, not calibrated."
    if drafter.confidence_head is None:
        calibrated = "There are no confidences: past acceptance decides how much is verified."
    elif (sampled := config.calibration(greedy=False)) != (None, None) or config.calibration(greedy=True) != sampled:
        calibrated = "The confidences are calibrated on rollouts; the values are in config.json."
    profile = "No load profile comes along"
    if drafter.load_profile is not None:
        profile = "The load profile in this folder is that of the machine it was measured on"
    return f"{calibrated} {profile}; measure your own with `drafter.load_profile = LoadProfile.measure(target, drafter)`."
