"""The command line: `hf-dspark demo`, `train`, `regenerate`, `profile`."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

app = typer.Typer(
    help="DSpark speculative decoding for transformers.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
)

Target = Annotated[str, typer.Option(help="Target model: a folder, a repo id, or 'default' for the embedded SmolLM2.")]


def _load_target(name: str) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Model and tokenizer by name, on the GPU where there is one."""
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "default":
        from .demo.target import load_target

        model, tokenizer = load_target()
    else:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        dtype = torch.float32 if device == "cpu" else "auto"
        try:
            model = AutoModelForCausalLM.from_pretrained(name, dtype=dtype).eval()
            tokenizer = AutoTokenizer.from_pretrained(name)
        except OSError as error:
            raise OSError(f"the target {name!r} could not be loaded: {error}") from error
    return model.to(device), tokenizer  # type: ignore[arg-type]


@app.command()
def demo(
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Length of each answer, in tokens.")] = 128,
) -> None:
    """Stream an answer of the embedded model, then compare plain decoding and DSpark.

    Example: hf-dspark demo --max-new-tokens 64
    """
    from .demo.show import run_demo

    run_demo(max_new_tokens)


@app.command()
def train(
    data: Annotated[list[Path], typer.Option(help="JSONL of conversations answered by the target; may be repeated.")],
    output: Annotated[Path, typer.Option(help="Folder for the drafter and its checkpoints.")],
    target: Target = "default",
    drafter: Annotated[Path | None, typer.Option(help="Drafter to go on from, instead of a new one.")] = None,
    steps: Annotated[int, typer.Option(min=1, help="Optimizer steps.")] = 1000,
    batch_size: Annotated[int, typer.Option(min=1, help="Conversations per step and process.")] = 4,
    num_anchors: Annotated[int, typer.Option(min=1, help="Blocks per conversation and step.")] = 512,
    learning_rate: Annotated[float, typer.Option(help="AdamW's, for all that Muon does not train.")] = 1e-3,
    muon_learning_rate: Annotated[float, typer.Option(help="Muon's, for the matrices of the backbone.")] = 0.01,
    optimizer: Annotated[Literal["muon", "host"], typer.Option(help="'host' is AdamW for everything.")] = "muon",
    layers: Annotated[int, typer.Option(min=1, help="Draft layers of a new drafter.")] = 2,
    block_size: Annotated[int, typer.Option(min=1, help="Tokens a new drafter drafts per block.")] = 7,
    markov_rank: Annotated[int, typer.Option(min=0, help="Rank of a new sequential head; 0 for none.")] = 64,
    head: Annotated[Literal["vanilla", "gated", "rnn"], typer.Option(help="Kind of a new sequential head.")] = "vanilla",
    draft_vocabulary: Annotated[
        int, typer.Option(min=0, help="Most used tokens that a new drafter drafts from; 0 for all.")
    ] = 0,
    mask_token_id: Annotated[int | None, typer.Option(help="An unused token; looked for when not given.")] = None,
    max_length: Annotated[int, typer.Option(min=8, help="Longest conversation, in tokens.")] = 1024,
    save_every: Annotated[int, typer.Option(min=1, help="Steps between checkpoints and evaluations.")] = 100,
    seed: Annotated[int, typer.Option(help="Seed of data order, anchors and new weights.")] = 0,
    from_target: Annotated[bool, typer.Option(help="Start a new drafter from what target and text tell.")] = True,
    cache_states: Annotated[
        Path | None, typer.Option(help="Folder to keep the target's states in, so that it runs only once over the text.")
    ] = None,
    resume: Annotated[bool, typer.Option(help="Go on from the last checkpoint in --output.")] = False,
) -> None:
    """Train a drafter for a target, which stays frozen and runs on the fly.

    Example: hf-dspark train --data answers.jsonl --output my-drafter --steps 500 --draft-vocabulary 8192
    """
    from .modeling_dspark import DSparkDraftModel
    from .training.run import train_drafter
    from .training.trainer import DSparkTrainingArguments

    start = None if drafter is None else DSparkDraftModel.from_pretrained(drafter)
    model, tokenizer = _load_target(target)
    arguments = DSparkTrainingArguments(
        output_dir=str(output),
        max_steps=steps,
        per_device_train_batch_size=batch_size,
        per_device_eval_batch_size=batch_size,
        num_anchors=num_anchors,
        learning_rate=learning_rate,
        muon_learning_rate=muon_learning_rate,
        optimizer=optimizer,
        lr_scheduler_type="cosine",
        warmup_steps=max(1, steps // 25),
        eval_strategy="steps",
        eval_steps=save_every,
        save_steps=save_every,
        save_total_limit=2,
        logging_steps=max(1, save_every // 10),
        seed=seed,
        report_to=[],
    )
    train_drafter(
        model,
        tokenizer,
        data,
        arguments,
        drafter=start,
        mask_token_id=mask_token_id,
        max_sequence_length=max_length,
        start=from_target,
        cache_folder=cache_states,
        resume=resume,
        num_hidden_layers=layers,
        block_size=block_size,
        markov_rank=markov_rank,
        markov_head_type=head,
        draft_vocab_size=draft_vocabulary or None,
    )
    print(f"Drafter saved to {output}.")


@app.command()
def regenerate(
    prompts: Annotated[Path, typer.Option(help='JSONL of {"prompt": ...} or {"messages": [...]}.')],
    output: Annotated[Path, typer.Option(help="JSONL of answered conversations; an existing file is continued.")],
    target: Target = "default",
    samples: Annotated[int, typer.Option(min=1, help="Answers per prompt.")] = 1,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 is greedy.")] = 1.0,
    top_k: Annotated[int, typer.Option(min=1, help="Sample from this many tokens.")] = 50,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Longest answer, in tokens.")] = 256,
    batch_size: Annotated[int, typer.Option(min=1, help="Answers written at the same time.")] = 64,
    seed: Annotated[int, typer.Option(help="Seed of the sampling.")] = 0,
) -> None:
    """Let the target answer prompts in bulk: the text to train a drafter on.

    Example: hf-dspark regenerate --prompts prompts.jsonl --output answers.jsonl --samples 4
    """
    import torch

    from .packing import pack_linears
    from .training.regenerate import regenerate_file

    model, tokenizer = _load_target(target)
    if model.device.type == "cpu" and model.dtype == torch.float32 and torch.backends.mkldnn.is_available():
        pack_linears(model, rows=batch_size)
    written = regenerate_file(
        model,
        tokenizer,
        prompts,
        output,
        samples=samples,
        temperature=temperature,
        top_k=top_k,
        max_new_tokens=max_new_tokens,
        batch_size=batch_size,
        seed=seed,
    )
    print(f"{written} answers added to {output}.")


@app.command()
def profile(
    output: Annotated[Path, typer.Option(help="Where to write the profile, as JSON.")],
    target: Target = "default",
    drafter: Annotated[Path | None, typer.Option(help="Drafter whose draft time to measure too.")] = None,
    context_length: Annotated[int, typer.Option(min=1, help="Cached tokens behind which to measure.")] = 256,
) -> None:
    """Measure what a forward of the target costs here, by number of tokens.

    Example: hf-dspark profile --output load_profile.json
    """
    from .load_profile import LoadProfile
    from .modeling_dspark import DSparkDraftModel

    model, _ = _load_target(target)
    draft_model = None if drafter is None else DSparkDraftModel.from_pretrained(drafter).to(model.device)
    measured = LoadProfile.measure(model, draft_model, context_length=context_length)
    measured.save(output)
    print(json.dumps({str(size): round(1e3 / rate, 2) for size, rate in measured.steps_per_second.items()}))


def main() -> None:
    """Entry point: one line for an error, the traceback only with HF_DSPARK_DEBUG=1."""
    from huggingface_hub.errors import StrictDataclassError

    try:
        app()
    except (ValueError, OSError, ImportError, FloatingPointError, StrictDataclassError) as error:
        if os.environ.get("HF_DSPARK_DEBUG"):
            raise
        print("hf-dspark: " + " ".join(str(error).split()), file=sys.stderr)
        sys.exit(1)
