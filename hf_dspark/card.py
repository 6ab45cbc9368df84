"""The model card of a drafter: what it is, what it was measured to do, how to use it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCard, ModelCardData

from .configuration_dspark import DSparkConfig
from .evaluation.rollouts import ALL
from .formats import own, packaging_of
from .modeling_dspark import DSparkDraftModel


def model_card(
    drafter: DSparkDraftModel,
    name: str,
    base_model: str,
    *,
    results: Sequence[dict[str, Any]] = (),
    license: str | None = None,
    datasets: Sequence[str] = (),
    training: str = "",
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
        training (`str`): Markdown on how it was trained, see [`training_facts`].
        notes (`str`): Markdown to put behind that: whatever else is to be known.

    Returns:
        `ModelCard`: its `save(path)` writes the file, its `data.eval_results` hold the accepted lengths.

    Raises:
        ValueError: the results are of drafts of another length.
    """
    config = drafter.config
    lengths = {len(row["reliability"]) for row in results}
    if lengths - {config.num_draft_tokens}:
        raise ValueError(
            f"the results are of drafts of {max(lengths)} tokens, and this drafter's have {config.num_draft_tokens}: they "
            "belong to another one. Evaluate this drafter."
        )
    has_code = drafter.folder is None or packaging_of(drafter.folder)[0] is own  # the files that AutoModel and generate need
    parameters = sum(parameter.numel() for parameter in drafter.parameters())
    measured = [row for row in results if row["prompts"] != ALL]
    data = ModelCardData(
        language=None,
        license=license,
        library_name="transformers",
        base_model=base_model,
        pipeline_tag="text-generation",
        tags=["speculative-decoding", "dspark", "draft-model", *(["custom_generate"] if has_code else [])],
        datasets=list(datasets) or None,
        model_name=name if measured else None,  # of the results
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
        "its own; embedding and LM head are the target's. With it the target writes its own text in fewer forwards. The "
        "method is DSpark ([arXiv 2607.05147](https://arxiv.org/abs/2607.05147)).",
        "## Use",
        "With the package `hf-dspark` installed:",
        "```python\nfrom hf_dspark import DSparkDraftModel\nfrom transformers import AutoModelForCausalLM, AutoTokenizer\n\n"
        f'tokenizer = AutoTokenizer.from_pretrained("{base_model}")\n'
        f'target = AutoModelForCausalLM.from_pretrained("{base_model}", dtype="auto")\n'
        f'drafter = DSparkDraftModel.from_pretrained("{name}", dtype=target.dtype).to(target.device)\n'
        'inputs = tokenizer.apply_chat_template(\n    [{"role": "user", "content": "Why is the sky blue?"}],\n'
        '    add_generation_prompt=True,\n    return_dict=True,\n    return_tensors="pt",\n)\n'
        "output = target.generate(**inputs, assistant_model=drafter, max_new_tokens=128)\n"
        "print(tokenizer.decode(output[0], skip_special_tokens=True), drafter.statistics)\n```",
        "Batches, sampling, streaming and every other option of `generate` stay as they are.",
    ]
    if has_code:
        parts += [
            "A script that does not import hf_dspark can use it too, where the package is installed and the two short Python "
            "files here are trusted:",
            f'```python\noutput = target.generate(\n    **inputs,\n    max_new_tokens=128,\n    custom_generate="{name}",\n'
            f'    assistant_model="{name}",\n    trust_remote_code=True,\n)\n```',
            f'`AutoModel.from_pretrained("{name}", trust_remote_code=True)` gives the drafter itself.',
        ]
    parts += ["## Serve", _serving(config, name, base_model)]
    if results:
        parts += ["## Measured", _table(results, config.num_draft_tokens)]
    parts += ["## Confidences and load", _scheduling(drafter)]
    if training:
        parts += ["## Training", training.strip()]
    if notes:
        parts.append(notes.strip())
    parts += [
        "## Limits",
        f"- It is made for {base_model} and the text it was trained on. With another target of the same shape, another chat "
        "template or another thinking mode the text stays right, and drafts are rejected.\n"
        "- Greedy text equals plain decoding in float32; in shorter dtypes it is the target's up to its own numerics. Sampled "
        "text has the target's distribution, not the same random sequence.\n"
        "- Accepted length is not speed: how much a verified token costs depends on the machine and its load.",
    ]
    return ModelCard("\n\n".join(parts) + "\n")


def training_facts(folder: Path) -> str:
    """What the newest checkpoint that `hf-dspark train` left in a drafter's folder says about the training.

    Returns:
        `str`: Markdown; empty where there is no such checkpoint.

    Raises:
        ValueError: the checkpoint's state is damaged.
    """
    from .training.run import TRAINER_STATE_NAME, last_checkpoint  # here, since it brings all of training along

    checkpoint = last_checkpoint(folder)
    if checkpoint is None:
        return ""
    path = Path(checkpoint) / TRAINER_STATE_NAME
    try:
        state = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is damaged ({error}). Remove that checkpoint.") from error
    facts = [f"{state['global_step']:,} steps, {state['epoch']:.1f} passes over the text."]
    measured = [entry for entry in state["log_history"] if "eval_tau" in entry]
    if measured:
        # The host keeps the best value of the metric that chooses; by default that is the loss.
        if state.get("best_metric") == max(entry["eval_tau"] for entry in measured):
            facts[0] += " The checkpoint with the highest τ on conversations kept out of training was saved."
        shown = [measured[i * (len(measured) - 1) // 5] for i in range(6)] if len(measured) > 6 else measured
        facts += [
            "τ on those conversations, each token drafted behind the text's own:",
            "| step | passes | τ sampled | τ greedy |\n|---|---|---|---|\n"
            + "\n".join(
                f"| {entry['step']:,} | {entry['epoch']:.1f} | {entry['eval_tau']:.2f} | {entry['eval_tau_greedy']:.2f} |"
                for entry in shown
            ),
        ]
    return "\n\n".join(facts)


def _serving(config: DSparkConfig, name: str, base_model: str) -> str:
    """How to write the drafter for the engines that can express it, and how to start them."""
    whole = config.draft_vocab_size is None
    dflash = whole and not (config.markov_rank or config.enable_confidence_head or config.sample_from_anchor)
    deepspec = whole and config.sample_from_anchor

    def convert(folder: str, packaging: str) -> str:
        return f"```bash\nhf-dspark convert {name} {folder} \\\n    --to {packaging} --target {base_model}\n"

    options = {
        "method": "dflash" if dflash else "dspark",
        "model": "for-vllm",
        "num_speculative_tokens": config.num_draft_tokens,
    }
    if config.backbone_type == "gemma4":
        form = "DeepSpec's form is the only other one for draft layers of Gemma4:"
        return f"{form}\n\n{convert('for-deepspec', 'deepspec')}```"
    parts = [
        "Other engines read other forms of the same drafter. vLLM:",
        convert("for-vllm", "dflash" if dflash else "speculators")
        + f"vllm serve {base_model} \\\n    --speculative-config '{json.dumps(options)}'\n```",
    ]
    if dflash or deepspec:
        parts += [
            "SGLang:" if dflash else "SGLang, where the target is a Qwen3:",
            convert("for-sglang", "dflash" if dflash else "deepspec")
            + f"python -m sglang.launch_server --model-path {base_model} \\\n"
            f"    --speculative-algorithm {'DFLASH' if dflash else 'DSPARK'} --speculative-draft-model-path for-sglang\n```",
        ]
    else:
        missing = "anchor layout" if whole else "reduced vocabulary"
        parts.append(f"SGLang reads DeepSpec's form, which cannot express the {missing} of this drafter.")
    last = "The forms are written after their descriptions and were not tried in the engines themselves."
    if config.is_calibrated:
        last += " They have no place for calibration, which is left out."
    return "\n\n".join([*parts, last])


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
    elif config.is_calibrated:
        calibrated = "The confidences are calibrated on rollouts; the values are in config.json."
    profile = "No load profile comes along"
    if drafter.saved_profile is not None:
        profile = "The load profile in this folder is that of the machine it was measured on"
    return (
        "How many drafted tokens are verified follows from the drafter's confidences and from what a forward costs. "
        f"{calibrated} {profile}; measure your own:\n\n```python\nfrom hf_dspark import LoadProfile\n\n"
        "drafter.load_profile = LoadProfile.measure(target, drafter)\n```"
    )
