"""The command line: `hf-dspark` with its commands, each a thin layer over a public function."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from .loading import drafter_by_name, target_by_name

if TYPE_CHECKING:
    from transformers import PreTrainedModel

app = typer.Typer(
    help="DSpark speculative decoding for transformers.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
)

Target = Annotated[str, typer.Option(help="Target model: a folder, a repo id, or 'default' for the embedded SmolLM2.")]

Drafter = Annotated[str, typer.Option(help="Drafter: a folder, a repo id, or 'default' for the one that comes along.")]
JsonOutput = Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")]

# Of the commands that roll out.
Prompts = Annotated[list[Path], typer.Option(help="JSONL of prompts, or a folder of such files; may be repeated.")]
Count = Annotated[int | None, typer.Option(min=1, help="Prompts of each file; all when not given.")]
AnswerTokens = Annotated[int, typer.Option(min=1, help="Longest answer, in tokens.")]
RolloutBatch = Annotated[int, typer.Option(min=1, help="Prompts per call.")]
Temperatures = Annotated[
    list[float] | None, typer.Option(min=0.0, help="0 is greedy; may be repeated. 0 and 1 when not given.")
]


def _settings(temperatures: list[float] | None) -> dict[str, dict]:
    """Arguments of `generate` by name, for the temperatures asked for."""
    from .evaluation import SETTINGS

    if not temperatures:
        return SETTINGS
    sampled = SETTINGS["T=1"]
    return {f"T={t:g}": SETTINGS["T=0"] if t == 0 else sampled | {"temperature": t} for t in temperatures}


def _pack_for_bulk(model: PreTrainedModel, rows: int) -> None:
    """Pre-packed matrices, which pay for many rows, where the processor has them."""
    import torch

    from .packing import pack_linears

    if model.device.type == "cpu" and model.dtype == torch.float32 and torch.backends.mkldnn.is_available():
        pack_linears(model, rows=rows)


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

    What is saved in the end is the checkpoint with the highest accepted length on conversations set aside.

    Example: hf-dspark train --data answers.jsonl --output my-drafter --steps 500 --draft-vocabulary 8192
    """
    from .modeling_dspark import DSparkDraftModel
    from .training.run import train_drafter
    from .training.trainer import DSparkTrainingArguments

    start = None if drafter is None else DSparkDraftModel.from_pretrained(drafter)
    model, tokenizer = target_by_name(target)
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
        load_best_model_at_end=True,
        metric_for_best_model="tau",
        greater_is_better=True,
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
    from .training.regenerate import regenerate_file

    model, tokenizer = target_by_name(target)
    _pack_for_bulk(model, batch_size)
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
def synthesize(
    output: Annotated[Path, typer.Option(help="JSONL of prompts; an existing file is continued.")],
    count: Annotated[int, typer.Option(min=1, help="Prompts wanted in the file.")],
    target: Target = "default",
    temperature: Annotated[float, typer.Option(help="Above 0.")] = 1.0,
    top_k: Annotated[int, typer.Option(min=1, help="Sample from this many tokens.")] = 50,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Longest prompt, in tokens.")] = 128,
    batch_size: Annotated[int, typer.Option(min=1, help="Prompts written at the same time.")] = 64,
    seed: Annotated[int, typer.Option(help="Seed of the sampling.")] = 0,
) -> None:
    """Let the target make up prompts, as its users would write them, for `regenerate` to have answered.

    Example: hf-dspark synthesize --count 1000 --output prompts.jsonl
    """
    from .training.synthesize import synthesize_file

    model, tokenizer = target_by_name(target)
    _pack_for_bulk(model, batch_size)
    counts = synthesize_file(
        model,
        tokenizer,
        output,
        count,
        temperature=temperature,
        top_k=top_k,
        max_new_tokens=max_new_tokens,
        batch_size=batch_size,
        seed=seed,
    )
    written = counts.pop("written")
    dropped = ", ".join(f"{number} {reason}" for reason, number in counts.items() if number)
    print(f"{written} prompts added to {output}" + (f"; thrown away: {dropped}." if dropped else "."))


@app.command()
def evaluate(
    prompts: Prompts,
    target: Target = "default",
    drafter: Drafter = "default",
    count: Count = None,
    max_new_tokens: AnswerTokens = 128,
    batch_size: RolloutBatch = 1,
    temperature: Temperatures = None,
    output: Annotated[Path | None, typer.Option(help="JSON file for everything measured.")] = None,
    pictures: Annotated[Path | None, typer.Option(help="Folder for pictures.")] = None,
    json_output: JsonOutput = False,
) -> None:
    """Measure a drafter by real rollouts: accepted length, acceptance by position, what its confidences are worth.

    Every draft is verified to its end. Example: hf-dspark evaluate --prompts prompts.jsonl --pictures pictures
    """
    from .evaluation import draw_evaluation, read_prompt_sets
    from .evaluation import evaluate as run
    from .formats.files import write_text

    model, tokenizer = target_by_name(target)
    draft_model = drafter_by_name(drafter, model)
    results = []
    if not json_output:
        print(f"{'':<5} {'prompts':<12} {'tau':>5}  {'acceptance by position, given those before':<44}   ECE   AUC  text")
    for row in run(
        model,
        tokenizer,
        draft_model,
        read_prompt_sets(prompts, count),
        settings=_settings(temperature),
        batch_size=batch_size,
        max_new_tokens=max_new_tokens,
    ):
        results.append(row)
        if output is not None:
            write_text(output, json.dumps(results, indent=1) + "\n")
        if not json_output:
            print(_evaluation_line(row), flush=True)
    if pictures is not None:
        for path in draw_evaluation(results, pictures):
            if not json_output:
                print(path)
    if json_output:
        print(json.dumps(results))


def _evaluation_line(row: dict) -> str:
    """One row of `evaluate` for the terminal; ECE and AUC are those of the first position."""
    by_position = " ".join("   - " if e["conditional"] is None else f"{e['conditional']:.2f} " for e in row["reliability"])
    first = row["reliability"][0]
    ece = f"{first['ece']:5.3f}" if first["blocks"] else "    -"
    auc = f"{first['auc']:5.2f}" if first.get("auc") is not None else "    -"
    match = ", ".join(f"{count} {name}" for name, count in row["match"].items())
    return f"{row['setting']:<5} {row['prompts'][:12]:<12} {row['tau']:>5.2f}  {by_position:<44} {ece} {auc}  {match}"


@app.command()
def calibrate(
    prompts: Prompts,
    output: Annotated[Path, typer.Option(help="Folder to save the calibrated drafter to; may be the drafter's own.")],
    target: Target = "default",
    drafter: Drafter = "default",
    count: Count = None,
    max_new_tokens: AnswerTokens = 128,
    batch_size: RolloutBatch = 1,
    temperature: Temperatures = None,
    sts: Annotated[Path | None, typer.Option(help="Also write the temperatures as SGLang's STS JSON.")] = None,
    json_output: JsonOutput = False,
) -> None:
    """Fit the temperatures of a drafter's confidences to rollouts, and save them with it.

    Example: hf-dspark calibrate --prompts held_out.jsonl --output calibrated-drafter
    """
    from dataclasses import asdict

    from .evaluation import fit_temperatures, read_prompt_sets, roll_out

    model, tokenizer = target_by_name(target)
    draft_model = drafter_by_name(drafter, model)
    sets = read_prompt_sets(prompts, count)
    blocks = [
        block
        for options in _settings(temperature).values()
        for conversations in sets.values()
        for block in roll_out(
            model, tokenizer, draft_model, conversations, batch_size=batch_size, max_new_tokens=max_new_tokens, **options
        )
    ]
    found = fit_temperatures(blocks, draft_model, dataset=", ".join(sets))
    stored = drafter_by_name(drafter)  # as it is on disk: what was loaded to run may be in another precision
    stored.config.confidence_temperatures = found.temperatures
    stored.save_pretrained(output)
    if sts is not None:
        found.save(sts)
    if json_output:
        print(json.dumps(asdict(found)))
        return
    print(f"{found.num_samples} blocks\n{'position':>8} {'temperature':>12} {'ECE before':>11} {'after':>7}")
    for position, values in enumerate(zip(found.temperatures, found.ece_before, found.ece_after, strict=True), start=1):
        print("{:>8} {:>12.2f} {:>11.3f} {:>7.3f}".format(position, *values))
    print(f"Drafter saved to {output}.")


@app.command()
def card(
    drafter: Annotated[Path, typer.Option(help="Folder of the drafter; its README.md is written.")],
    base_model: Annotated[str, typer.Option(help="Repo id of the target.")],
    name: Annotated[str | None, typer.Option(help="Title; the folder's name when not given.")] = None,
    results: Annotated[Path | None, typer.Option(help="JSON that `hf-dspark evaluate --output` wrote.")] = None,
    license: Annotated[str | None, typer.Option(help="Such as apache-2.0.")] = None,
    dataset: Annotated[list[str] | None, typer.Option(help="Repo id of training prompts; may be repeated.")] = None,
    notes: Annotated[Path | None, typer.Option(help="Markdown to include: what else is to be known.")] = None,
) -> None:
    """Write the model card of a drafter from what was measured.

    Example: hf-dspark card --drafter my-drafter --base-model Qwen/Qwen3-4B --results results.json --license apache-2.0
    """
    from .card import model_card, training_facts
    from .formats import own
    from .formats.files import write_text

    content = model_card(
        drafter_by_name(drafter),
        name or drafter.resolve().name,
        base_model,
        results=() if results is None else json.loads(results.read_text(encoding="utf-8")),
        license=license,
        datasets=dataset or (),
        training=training_facts(drafter),
        notes="" if notes is None else notes.read_text(encoding="utf-8"),
    )
    write_text(drafter / "README.md", str(content))
    own.complete_folder(drafter)
    print(f"Card written to {drafter / 'README.md'}.")


@app.command()
def push(
    drafter: Annotated[Path, typer.Option(help="Folder of the drafter.")],
    repo_id: Annotated[str, typer.Option(help="Where to, such as user/my-drafter; made if it does not exist.")],
    private: Annotated[bool, typer.Option(help="Whether a new repository is private.")] = False,
) -> None:
    """Upload a drafter with its card, calibration and load profile to the Hub, after checking that it loads.

    A drafter saved by an earlier version first gets the files that AutoModel and custom_generate need.

    Example: hf-dspark push --drafter my-drafter --repo-id user/my-drafter
    """
    from huggingface_hub import HfApi

    from .formats import own

    drafter_by_name(drafter)
    own.complete_folder(drafter)
    api = HfApi()
    url = api.create_repo(repo_id, private=private, exist_ok=True)
    try:
        api.upload_folder(
            repo_id=url.repo_id,
            folder_path=drafter,
            allow_patterns=["*.safetensors", "*.json", "*.md", "*.jinja", *own.CODE_FILES],
            ignore_patterns=["checkpoint-*"],
            commit_message="Upload DSpark drafter",
        )
    except RuntimeError as error:  # of a file; the reason is what it was raised from
        raise OSError(f"{error} {error.__cause__ or ''} Nothing was committed; push again.") from error
    print(url)


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

    model, _ = target_by_name(target)
    draft_model = None if drafter is None else drafter_by_name(drafter, model)
    measured = LoadProfile.measure(model, draft_model, context_length=context_length)
    measured.save(output)
    print(json.dumps({str(size): round(1e3 / rate, 2) for size, rate in measured.steps_per_second.items()}))


@app.command()
def inspect(
    checkpoint: Annotated[str, typer.Argument(help="Drafter in any packaging: a folder or a repo id.")],
    target: Annotated[str | None, typer.Option(help="Target to try the drafter on: a folder, a repo id, or 'default'.")] = None,
    json_output: JsonOutput = False,
) -> None:
    """Say how a drafter's files are read, and why, and whether they fit a target.

    Example: hf-dspark inspect my-drafter --target default
    """
    from .formats import packaging_of
    from .formats.files import find_folder
    from .formats.inspection import inspect_checkpoint
    from .modeling_dspark import DSparkDraftModel

    folder = find_folder(checkpoint, check=packaging_of)
    report = inspect_checkpoint(folder)
    if target is not None:
        model, _ = target_by_name(target)
        drafter = DSparkDraftModel.from_pretrained(folder)
        try:
            drafter.bind(model)
            report |= {"target": target, "fits": True, "reason": None}
        except ValueError as error:
            report |= {"target": target, "fits": False, "reason": str(error)}
    if json_output:
        print(json.dumps(report))
    else:
        print(f"Packaging: {report['packaging']}")
        for name in ("decisions", "notes"):
            print("".join(f"{name.capitalize()[:-1]}: {line}\n" for line in report[name]), end="")
        print("".join(f"  {name}: {value}\n" for name, value in report["config"].items()), end="")
        print(f"{report['parameters']} parameters in {report['dtype']}; drafts {report['draft_tokens']} tokens a block.")
        if target is not None:
            print(f"Fits {target}: " + ("yes" if report["fits"] else f"no, {report['reason']}"))
    if report.get("fits") is False:
        raise typer.Exit(1)


@app.command()
def convert(
    source: Annotated[str, typer.Argument(help="Drafter in any packaging that is read: a folder or a repo id.")],
    output: Annotated[Path, typer.Argument(help="New folder for the converted drafter.")],
    to: Annotated[Literal["deepspec", "speculators", "dflash"], typer.Option(help="Packaging to write.")],
    target: Annotated[
        str | None,
        typer.Option(help="The drafter's target, which deepspec and speculators need: a folder, a repo id, 'default'."),
    ] = None,
) -> None:
    """Write a drafter in the packaging of another program.

    Example: hf-dspark convert my-drafter for-vllm --to speculators --target Qwen/Qwen3-4B
    """
    from .formats.export import export_checkpoint
    from .modeling_dspark import DSparkDraftModel

    drafter = DSparkDraftModel.from_pretrained(source)
    export_checkpoint(drafter, output, to, None if target is None else target_by_name(target)[0])
    print(f"Drafter written to {output} as {to}.")


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
