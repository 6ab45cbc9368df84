"""The command line: `hf-dspark` with its commands, each a thin layer over a public function.

Results go to stdout, and with `--json` nothing else does. The exit code is 0, 1 after an error, which is one line on stderr,
and 2 where the command line itself is wrong.
"""

from __future__ import annotations

import functools
import json
import re
import sys
from contextlib import AbstractContextManager, nullcontext, redirect_stdout, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from .errors import require_extra
from .loading import drafter_by_name, target_by_name

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from .modeling_dspark import DSparkDraftModel

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
)

Target = Annotated[str, typer.Option(help="Target model: a folder, a repo id, or 'default' for the embedded SmolLM2.")]
ChatTemplate = Annotated[
    str | None, typer.Option(metavar="JSON", help="Arguments of the chat template, such as '{\"enable_thinking\": false}'.")
]
Drafter = Annotated[str, typer.Option(help="Drafter: a folder, a repo id, or 'default' for the one that comes along.")]
JsonOutput = Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")]

_SOURCE = "a JSONL file, or a data set as NAME[:CONFIGURATION][:SPLIT]"

# Of the commands that roll out.
Prompts = Annotated[list[Path], typer.Option(help="JSONL of prompts, or a folder of such files; may be repeated.")]
Count = Annotated[int | None, typer.Option(min=1, help="Prompts of each file; all when not given.")]
AnswerTokens = Annotated[int, typer.Option(min=1, help="Longest answer, in tokens.")]
RolloutBatch = Annotated[int, typer.Option(min=1, help="Prompts per call.")]
Temperatures = Annotated[
    list[float] | None, typer.Option(min=0.0, help="0 is greedy; may be repeated. 0 and 1 when not given.")
]


@app.callback()
def options(
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error; may stand anywhere.")] = False,
) -> None:
    """DSpark speculative decoding for transformers: the target's own text, sooner.

    A target is a causal language model, a drafter the small model that proposes its next tokens. Where an answer is
    to be written, the embedded pair is meant without --target and --drafter.

    \b
    Examples:
      hf-dspark demo
      hf-dspark generate "Why is the sky blue?" --plain
      hf-dspark train --help
    """


def _people_only(json_output: bool) -> AbstractContextManager:
    """With --json, what is printed inside goes to stderr."""
    return redirect_stdout(sys.stderr) if json_output else nullcontext()


def _load_target(name: str, chat_template_kwargs: str | None) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """A target, and its tokenizer with a chat template that takes these arguments from now on."""
    arguments = None
    if chat_template_kwargs is not None:
        with suppress(ValueError):
            arguments = json.loads(chat_template_kwargs)
        if not isinstance(arguments, dict):
            raise typer.BadParameter(f"--chat-template-kwargs must be a JSON object, got {chat_template_kwargs!r}.")
    model, tokenizer = target_by_name(name)
    if arguments:
        tokenizer.apply_chat_template = functools.partial(tokenizer.apply_chat_template, **arguments)  # type: ignore[method-assign]
    return model, tokenizer


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
    json_output: JsonOutput = False,
) -> None:
    """Stream an answer, then compare plain decoding and DSpark.

    Uses the embedded target and its drafter.

    \b
    Examples:
      hf-dspark demo
      hf-dspark demo --max-new-tokens 64
    """
    from .demo.show import run_demo

    with _people_only(json_output):
        total = run_demo(max_new_tokens)
    if json_output:
        print(json.dumps(total))


@app.command()
def generate(
    prompt: Annotated[str | None, typer.Argument(help="The user's turn; '-' or nothing for that on stdin.")] = None,
    file: Annotated[Path | None, typer.Option(help="File to read the prompt from.")] = None,
    target: Target = "default",
    chat_template_kwargs: ChatTemplate = None,
    drafter: Drafter = "default",
    max_new_tokens: AnswerTokens = 128,
    sample: Annotated[bool, typer.Option("--sample", help="Sample; greedy when not given.")] = False,
    temperature: Annotated[float | None, typer.Option(min=0.0, help="Of --sample: 1 when not given, 0 is greedy.")] = None,
    top_k: Annotated[int | None, typer.Option(min=0, help="Of --sample: 50 when not given, 0 for all tokens.")] = None,
    top_p: Annotated[float | None, typer.Option(min=0.0, max=1.0, help="Of --sample: 1 when not given.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of the sampling.")] = 0,
    raw: Annotated[bool, typer.Option("--raw", help="Go on with the text as it stands, without the chat template.")] = False,
    plain: Annotated[bool, typer.Option("--plain", help="Also decode without the drafter, and compare.")] = False,
    measure: Annotated[
        bool, typer.Option("--measure", help="Time forwards here first, instead of going by the drafter's load profile.")
    ] = False,
    json_output: JsonOutput = False,
) -> None:
    """Answer a prompt, streamed, and say what the drafter was worth.

    The text goes to stdout, the numbers to stderr.

    \b
    Examples:
      hf-dspark generate "Why is the sky blue?" --plain
      hf-dspark generate --file prompt.txt --sample --temperature 0.7
      echo "Once upon a time" | hf-dspark generate --raw --max-new-tokens 64
      hf-dspark generate "What is 17 times 23?" --json
    """
    from .answering import answer_prompt
    from .load_profile import LoadProfile

    given = {"temperature": temperature, "top_k": top_k, "top_p": top_p}
    sampling = {name: value for name, value in given.items() if value is not None}
    if sampling and not sample:
        raise typer.BadParameter(
            f"--{next(iter(sampling)).replace('_', '-')} needs --sample, since greedy decoding ignores it."
        )
    if prompt not in (None, "-") and file is not None:
        raise typer.BadParameter("give either a prompt or --file, not both.")
    if file is not None:
        prompt = _read_text(file)
    elif prompt in (None, "-"):
        if prompt is None and sys.stdin.isatty():
            raise typer.BadParameter("give a prompt, --file, or a text on stdin.")
        prompt = sys.stdin.read()
    how: dict = {"do_sample": False}
    if sample and temperature != 0:
        how = {"do_sample": True, "temperature": 1.0, "top_k": 50, "top_p": 1.0} | sampling
    model, tokenizer = _load_target(target, chat_template_kwargs)
    draft_model = drafter_by_name(drafter, model)
    if measure:
        draft_model.load_profile = LoadProfile.measure(model, draft_model)
    report = answer_prompt(
        model,
        tokenizer,
        draft_model,
        prompt,
        raw=raw,
        plain=plain,
        stream=not json_output,
        seed=seed,
        max_new_tokens=max_new_tokens,
        **how,
    )
    if json_output:
        print(json.dumps(report))
        return
    lines = [
        f"DSpark: {_rate(report)}; tau {report['tau']:.2f}; of {report['verified']} drafted tokens verified, "
        f"{report['rejected']} were rejected."
    ]
    if plain:
        ratio = report["tokens_per_second"] / report["plain"]["tokens_per_second"]
        lines.append(f"plain:  {_rate(report['plain'])}. Ratio {ratio:.2f}, one run each. Texts: {report['match']}.")
    print("\n".join(lines), file=sys.stderr)


def _rate(run: dict) -> str:
    return f"{run['tokens']} tokens in {run['seconds']:.2f} s, {run['tokens_per_second']:.1f} tokens/s"


@app.command()
def train(
    data: Annotated[list[str], typer.Option(help=f"Conversations answered by the target: {_SOURCE}; may be repeated.")],
    output: Annotated[Path, typer.Option(help="Folder for the drafter and its checkpoints.")],
    target: Target = "default",
    chat_template_kwargs: ChatTemplate = None,
    drafter: Annotated[
        str | None, typer.Option(help="Drafter to go on from instead of a new one: a folder, a repo id, or 'default'.")
    ] = None,
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
    key_value_heads: Annotated[
        int | None, typer.Option(min=1, help="Of a new drafter's layers; as many as the target's when not given.")
    ] = None,
    sliding_window: Annotated[
        int | None, typer.Option(min=1, help="Tokens that a new drafter looks back; all when not given.")
    ] = None,
    sample_from_anchor: Annotated[
        bool, typer.Option(help="Whether the first slot of a new drafter's block drafts; DFlash's does not.")
    ] = True,
    cross_entropy_weight: Annotated[float, typer.Option(min=0.0, help="Of the loss's term on the text's tokens.")] = 0.1,
    distance_weight: Annotated[float, typer.Option(min=0.0, help="Of the distance to the target's law.")] = 0.9,
    confidence_weight: Annotated[float, typer.Option(min=0.0, help="Of the confidence term; 0 trains no confidences.")] = 1.0,
    loss_decay: Annotated[float, typer.Option(help="Slot k of a block counts exp(-(k-1)/decay).")] = 4.0,
    max_logit_positions: Annotated[
        int, typer.Option(min=1, help="Positions whose logits exist at once; fewer need less memory.")
    ] = 1024,
    bf16: Annotated[
        bool, typer.Option("--bf16", help="Compute in bfloat16, weights stay float32: for hardware that has it.")
    ] = False,
    mask_token_id: Annotated[int | None, typer.Option(help="An unused token; looked for when not given.")] = None,
    max_length: Annotated[int, typer.Option(min=8, help="Longest conversation, in tokens.")] = 1024,
    save_every: Annotated[int, typer.Option(min=1, help="Steps between checkpoints and evaluations.")] = 100,
    seed: Annotated[int, typer.Option(help="Seed of data order, anchors and new weights.")] = 0,
    from_target: Annotated[bool, typer.Option(help="Start a new drafter from what target and text tell.")] = True,
    cache_states: Annotated[
        Path | None, typer.Option(help="Folder to keep the target's states in, so that it runs only once over the text.")
    ] = None,
    resume: Annotated[
        bool, typer.Option(help="Go on from the last checkpoint in --output, whose shape the drafter then has.")
    ] = False,
    json_output: JsonOutput = False,
) -> None:
    """Train a drafter for a target, which stays frozen.

    The target runs inside the training step. What is saved in the end is the checkpoint with the highest accepted length
    on conversations set aside.

    \b
    Examples:
      hf-dspark train --data answers.jsonl --output my-drafter \\
        --steps 500 --block-size 5 --draft-vocabulary 8192
      hf-dspark train --data answers.jsonl --output my-drafter --resume
      hf-dspark train --data answers.jsonl --output next --drafter my-drafter
    """
    import torch

    from .training.run import train_drafter
    from .training.trainer import DSparkTrainingArguments

    arguments = DSparkTrainingArguments(  # first: it gives each process a device of its own
        output_dir=str(output),
        use_cpu=not torch.accelerator.is_available(),  # or several processes would not find each other
        max_steps=steps,
        per_device_train_batch_size=batch_size,
        per_device_eval_batch_size=batch_size,
        num_anchors=num_anchors,
        learning_rate=learning_rate,
        muon_learning_rate=muon_learning_rate,
        optimizer=optimizer,
        cross_entropy_weight=cross_entropy_weight,
        distance_weight=distance_weight,
        confidence_weight=confidence_weight,
        loss_decay=loss_decay,
        max_logit_positions=max_logit_positions,
        bf16=bf16,
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
        # Batches of like length have a tenth of the padding; with cached states padding costs next to nothing.
        train_sampling_strategy="random" if cache_states else "group_by_length",
        seed=seed,
        report_to=[],
    )
    start = None if drafter is None else drafter_by_name(drafter)
    model, tokenizer = _load_target(target, chat_template_kwargs)
    shape: dict[str, Any] = {
        "num_hidden_layers": layers,
        "block_size": block_size,
        "markov_rank": markov_rank,
        "markov_head_type": head,
        "draft_vocab_size": draft_vocabulary or None,
        "sliding_window": sliding_window,
        "sample_from_anchor": sample_from_anchor,
    }
    if key_value_heads is not None:
        shape["num_key_value_heads"] = key_value_heads
    with _people_only(json_output):
        _, trainer = train_drafter(
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
            **shape,
        )
        if trainer.is_world_process_zero():
            print(f"Drafter saved to {output}.")
    if json_output and trainer.is_world_process_zero():
        state = trainer.state
        print(json.dumps({"output": str(output), "steps": state.global_step, "tau": state.best_metric}))


@app.command()
def average(
    drafters: Annotated[
        list[str], typer.Argument(help="Drafters that come from one, runs or checkpoints: folders or repo ids.")
    ],
    output: Annotated[Path, typer.Option(help="New or empty folder for their mean.")],
    weight: Annotated[list[float] | None, typer.Option(help="Of each drafter; may be repeated. Equal when not given.")] = None,
    json_output: JsonOutput = False,
) -> None:
    """Average the weights of several runs.

    Runs that went on from a common drafter give a better one together than each alone. Calibrate it afterwards.

    \b
    Examples:
      hf-dspark average my-drafter next my-drafter/checkpoint-900 --output mean
    """
    from .formats.files import is_occupied
    from .training.averaging import average_drafters

    if is_occupied(output):
        raise ValueError(f"{output} holds something already. Name a new folder for the mean.")
    average_drafters([drafter_by_name(name) for name in drafters], weight).save_pretrained(output)
    print(json.dumps({"output": str(output)}) if json_output else f"Drafter saved to {output}.")


@app.command()
def regenerate(
    prompts: Annotated[str, typer.Option(help=f'{{"prompt": ...}} or {{"messages": [...]}}: {_SOURCE}.')],
    output: Annotated[Path, typer.Option(help="JSONL of answered conversations; an existing file is continued.")],
    target: Target = "default",
    chat_template_kwargs: ChatTemplate = None,
    samples: Annotated[int, typer.Option(min=1, help="Answers per prompt.")] = 1,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 is greedy.")] = 1.0,
    top_k: Annotated[int, typer.Option(min=1, help="Sample from this many tokens.")] = 50,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Longest answer, in tokens.")] = 256,
    batch_size: Annotated[int, typer.Option(min=1, help="Answers written at the same time.")] = 64,
    seed: Annotated[int, typer.Option(help="Seed of the sampling.")] = 0,
    json_output: JsonOutput = False,
) -> None:
    """Let the target answer prompts in bulk, to train on.

    \b
    Examples:
      hf-dspark regenerate --prompts prompts.jsonl --output answers.jsonl
      hf-dspark regenerate --prompts prompts.jsonl --output answers.jsonl \\
        --target Qwen/Qwen3-0.6B --samples 4 --temperature 0.7
    """
    from .training.regenerate import regenerate_file

    model, tokenizer = _load_target(target, chat_template_kwargs)
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
    if json_output:
        print(json.dumps({"output": str(output), "written": written}))
    else:
        print(f"{written} answers added to {output}.")


@app.command()
def synthesize(
    output: Annotated[Path, typer.Option(help="JSONL of prompts; an existing file is continued.")],
    count: Annotated[int, typer.Option(min=1, help="Prompts wanted in the file.")],
    target: Target = "default",
    chat_template_kwargs: ChatTemplate = None,
    temperature: Annotated[float, typer.Option(help="Above 0.")] = 1.0,
    top_k: Annotated[int, typer.Option(min=1, help="Sample from this many tokens.")] = 50,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Longest prompt, in tokens.")] = 128,
    batch_size: Annotated[int, typer.Option(min=1, help="Prompts written at the same time.")] = 64,
    seed: Annotated[int, typer.Option(help="Seed of the sampling.")] = 0,
    json_output: JsonOutput = False,
) -> None:
    """Let the target make up prompts for `regenerate`.

    They are what the target takes its users to write.

    \b
    Examples:
      hf-dspark synthesize --count 1000 --output prompts.jsonl
    """
    from .training.synthesize import synthesize_file

    model, tokenizer = _load_target(target, chat_template_kwargs)
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
    if json_output:
        print(json.dumps({"output": str(output), **counts}))
        return
    written = counts.pop("written")
    dropped = ", ".join(f"{number} {reason}" for reason, number in counts.items() if number)
    print(f"{written} prompts added to {output}" + (f"; thrown away: {dropped}." if dropped else "."))


@app.command()
def evaluate(
    prompts: Prompts,
    target: Target = "default",
    chat_template_kwargs: ChatTemplate = None,
    drafter: Drafter = "default",
    count: Count = None,
    max_new_tokens: AnswerTokens = 128,
    batch_size: RolloutBatch = 1,
    temperature: Temperatures = None,
    output: Annotated[Path | None, typer.Option(help="JSON file for everything measured.")] = None,
    pictures: Annotated[Path | None, typer.Option(help="Folder for pictures.")] = None,
    json_output: JsonOutput = False,
) -> None:
    """Measure a drafter by real rollouts.

    Accepted length, acceptance by position, and what the confidences are worth. Every draft is verified to its end.

    \b
    Examples:
      hf-dspark evaluate --prompts prompts.jsonl --pictures pictures
      hf-dspark evaluate --prompts prompts.jsonl --drafter my-drafter \\
        --temperature 0 --temperature 0.7 --output results.json
    """
    from .evaluation import draw_evaluation, read_prompt_sets
    from .evaluation import evaluate as run
    from .formats.files import write_text

    require_extra("evaluate", "sklearn", *(["matplotlib"] if pictures is not None else []))
    model, tokenizer = _load_target(target, chat_template_kwargs)
    draft_model = drafter_by_name(drafter, model)
    results = []
    if not json_output:
        print(
            f"{'':<5} {'prompts':<12} {'tau':>5}  {'acceptance by position, given those before':<44}   ECE (chance)   AUC  text"
        )
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
    """One row of `evaluate` for the terminal; ECE, also by chance, and AUC are those of the first position."""
    by_position = " ".join("   - " if e["conditional"] is None else f"{e['conditional']:.2f} " for e in row["reliability"])
    first = row["reliability"][0]
    ece = f"{first['ece']:5.3f}  ({first['ece_by_chance']:5.3f})" if first["blocks"] else f"{'-':>5} {'':8}"
    auc = f"{first['auc']:5.2f}" if first.get("auc") is not None else "    -"
    match = ", ".join(f"{count} {name}" for name, count in row["match"].items())
    return f"{row['setting']:<5} {row['prompts'][:12]:<12} {row['tau']:>5.2f}  {by_position:<44} {ece} {auc}  {match}"


@app.command()
def calibrate(
    prompts: Prompts,
    output: Annotated[Path, typer.Option(help="Folder to save the calibrated drafter to; may be the drafter's own.")],
    target: Target = "default",
    chat_template_kwargs: ChatTemplate = None,
    drafter: Drafter = "default",
    count: Count = None,
    max_new_tokens: AnswerTokens = 128,
    batch_size: RolloutBatch = 1,
    temperature: Temperatures = None,
    sts: Annotated[Path | None, typer.Option(help="Also write the temperatures as SGLang's STS JSON.")] = None,
    json_output: JsonOutput = False,
) -> None:
    """Fit a drafter's confidences to what becomes of its drafts.

    Greedy and sampled decoding are fitted apart, on rollouts, and saved with the drafter. What --temperature leaves out stays
    as it was.

    \b
    Examples:
      hf-dspark calibrate --prompts held_out.jsonl --output calibrated-drafter
      hf-dspark calibrate --prompts held_out.jsonl --drafter my-drafter \\
        --output my-drafter --sts sts.json
    """
    from dataclasses import asdict

    from .evaluation import fit_calibration, read_prompt_sets, roll_out, set_calibration
    from .formats import own, packaging_of

    require_extra("evaluate", "scipy")
    settings = _settings(temperature)
    if sts is not None and not any(options["do_sample"] for options in settings.values()):
        raise ValueError("`--sts` holds temperatures for sampling: give a --temperature above 0, or none for 0 and 1.")
    stored = drafter_by_name(drafter)  # as it is on disk: what is loaded to run may be in another precision
    if stored.confidence_head is None:
        raise ValueError("this drafter has no confidence head, so there is nothing to calibrate. Train one with it.")
    if output.resolve() == stored.folder.resolve() and packaging_of(output)[0] is not own:
        raise ValueError(
            f"`--output` {output} holds the drafter in another packaging, which has no place for calibration. Name another "
            "folder."
        )
    model, tokenizer = _load_target(target, chat_template_kwargs)
    draft_model = drafter_by_name(drafter, model)
    set_calibration(draft_model)
    sets = read_prompt_sets(prompts, count)
    blocks: dict[str, list] = {}
    for options in settings.values():
        for conversations in sets.values():
            blocks.setdefault("sampled" if options["do_sample"] else "greedy", []).extend(
                roll_out(
                    model,
                    tokenizer,
                    draft_model,
                    conversations,
                    batch_size=batch_size,
                    max_new_tokens=max_new_tokens,
                    **options,
                )
            )
    found = {name: fit_calibration(drafts, draft_model, dataset=", ".join(sets)) for name, drafts in blocks.items()}
    set_calibration(stored, **found, keep=True)
    stored.save_pretrained(output)
    if sts is not None:
        fit_calibration(blocks["sampled"], draft_model, dataset=", ".join(sets), offsets=False).save(sts)
    if json_output:
        print(json.dumps({name: asdict(values) for name, values in found.items()}))
        return
    for name, values in found.items():
        print(f"{name}, {values.num_samples} blocks")
        print(f"{'position':>8} {'temperature':>12} {'log-odds':>9} {'offset':>7} {'ECE before':>11} {'after':>7}")
        weights = values.log_odds_weights or [0.0] * len(values.temperatures)
        rows = zip(values.temperatures, weights, values.offsets, values.ece_before, values.ece_after, strict=True)
        for position, (divisor, weight, offset, *errors) in enumerate(rows, start=1):
            before, after = ("-" if error is None else f"{error:.3f}" for error in errors)
            print(f"{position:>8} {divisor:>12.2f} {weight:>+9.2f} {offset:>+7.2f} {before:>11} {after:>7}")
    print(f"Drafter saved to {output}.")


@app.command()
def card(
    drafter: Annotated[Path, typer.Option(help="Folder of the drafter; its README.md is written.")],
    base_model: Annotated[str, typer.Option(help="Repo id of the target.")],
    name: Annotated[
        str | None, typer.Option(help="Repo id it will have, user/my-drafter; the folder's name when not given.")
    ] = None,
    results: Annotated[Path | None, typer.Option(help="JSON that `hf-dspark evaluate --output` wrote.")] = None,
    license: Annotated[str | None, typer.Option(help="Such as apache-2.0.")] = None,
    dataset: Annotated[list[str] | None, typer.Option(help="Repo id of training prompts; may be repeated.")] = None,
    notes: Annotated[Path | None, typer.Option(help="Markdown to include: what else is to be known.")] = None,
    json_output: JsonOutput = False,
) -> None:
    """Write the model card of a drafter from what was measured.

    \b
    Examples:
      hf-dspark card --drafter my-drafter --name user/my-drafter \\
        --base-model Qwen/Qwen3-4B --results results.json --license apache-2.0
    """
    from .card import model_card, training_facts
    from .formats import own
    from .formats.files import write_text

    content = model_card(
        _in_folder(drafter),
        name or drafter.resolve().name,
        base_model,
        results=() if results is None else _read_results(results),
        license=license,
        datasets=dataset or (),
        training=training_facts(drafter),
        notes="" if notes is None else _read_text(notes),
    )
    path = drafter / "README.md"
    write_text(path, str(content))
    own.complete_folder(drafter)
    print(json.dumps({"output": str(path)}) if json_output else f"Card written to {path}.")


def _in_folder(drafter: Path) -> DSparkDraftModel:
    """A drafter that must be in a folder here, for what is written into it."""
    if not drafter.is_dir():
        raise ValueError(f"`--drafter` must be a folder here, and {drafter} is none. Save the drafter to one first.")
    return drafter_by_name(drafter)


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} must be text in UTF-8, got other bytes ({error}). Convert it.") from error


def _read_results(path: Path) -> list[dict]:
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))
        if not all({"setting", "prompts", "tau", "reliability"} <= row.keys() for row in rows):
            raise ValueError
    except (ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"{path}: expected the JSON that `hf-dspark evaluate --output` writes. Name such a file.") from error
    return rows


@app.command()
def push(
    drafter: Annotated[Path, typer.Option(help="Folder of the drafter.")],
    repo_id: Annotated[str, typer.Option(help="Where to, such as user/my-drafter; made if it does not exist.")],
    private: Annotated[bool, typer.Option(help="Whether a new repository is private.")] = False,
    json_output: JsonOutput = False,
) -> None:
    """Upload a drafter to the Hub, after checking that it loads.

    Its card, calibration and load profile go with it. A drafter saved by an
    earlier version first gets the files that AutoModel and custom_generate need.

    \b
    Examples:
      hf-dspark push --drafter my-drafter --repo-id user/my-drafter
    """
    from huggingface_hub import HfApi

    from .formats import own
    from .formats.files import LOAD_PROFILE_NAME

    _in_folder(drafter)
    readme = drafter / "README.md"
    named = re.search(r'DSparkDraftModel\.from_pretrained\("([^"]+)"', _read_text(readme) if readme.is_file() else "")
    own.complete_folder(drafter)
    api = HfApi()
    url = api.create_repo(repo_id, private=private, exist_ok=True)
    if named is not None and named[1] != url.repo_id:
        text = f"The card loads {named[1]!r}: write it again with `hf-dspark card --name {url.repo_id}`, and push again."
        print(text, file=sys.stderr)
    try:
        api.upload_folder(
            repo_id=url.repo_id,
            folder_path=drafter,
            allow_patterns=["*.safetensors", "*.json", "*.md", "*.jinja", *own.CODE_FILES],
            ignore_patterns=["*/*.safetensors", "*/*.json", "*/*.md", "*/*.jinja"],  # checkpoints, cached states
            # Of an earlier drafter there, where this one has none: weights in other pieces, a profile.
            delete_patterns=["model*.safetensors", "model*.safetensors.index.json", LOAD_PROFILE_NAME],
            commit_message="Upload DSpark drafter",
        )
    except RuntimeError as error:  # of a file; the reason is what it was raised from
        raise OSError(f"{error} {error.__cause__ or ''} Nothing was committed; push again.") from error
    print(json.dumps({"url": str(url)}) if json_output else url)


@app.command()
def profile(
    output: Annotated[Path, typer.Option(help="Where to write the profile, as JSON.")],
    target: Target = "default",
    drafter: Annotated[
        str | None, typer.Option(help="Drafter whose draft time to measure too: a folder, a repo id, or 'default'.")
    ] = None,
    context_length: Annotated[int, typer.Option(min=1, help="Cached tokens behind which to measure.")] = 256,
    packed: Annotated[bool, typer.Option("--packed", help="Measure the target with packed linear layers.")] = False,
    live: Annotated[bool, typer.Option("--live", help="Let the rounds decoded with it correct it.")] = False,
    json_output: JsonOutput = False,
) -> None:
    """Measure what a forward of the target costs here.

    Forwards of 1 to 128 tokens are timed, and with --drafter the drafting. A profile holds for the form of the target it was
    measured on: with --packed, for a target after `pack_linears`.

    \b
    Examples:
      hf-dspark profile --drafter default --output load_profile.json
      hf-dspark profile --drafter my-drafter --output my-drafter/load_profile.json
    """
    from .load_profile import LoadProfile
    from .packing import pack_linears

    model, _ = target_by_name(target)
    draft_model = None if drafter is None else drafter_by_name(drafter, model)
    if packed:
        pack_linears(model)
    measured = LoadProfile.measure(model, draft_model, context_length=context_length)
    measured = measured.live() if live else measured
    measured.save(output)
    milliseconds = {str(size): round(1e3 / rate, 2) for size, rate in measured.steps_per_second.items()}
    if json_output:
        draft = None if draft_model is None else round(1e3 * measured.draft_seconds, 2)
        print(json.dumps({"output": str(output), "milliseconds": milliseconds, "draft_milliseconds": draft}))
        return
    print("tokens in a forward, milliseconds:")
    for size, value in milliseconds.items():
        print(f"{size:>6} {value:>8.2f}")
    if draft_model is not None:
        print(f" draft {1e3 * measured.draft_seconds:>8.2f}")
    print(f"Profile saved to {output}.")


@app.command()
def simulate(
    traces: Annotated[Path, typer.Option(help="JSONL of recorded drafts; with --prompts it is written first.")],
    profile: Annotated[Path, typer.Option(help="Load profile of the machine: of `hf-dspark profile`, or SGLang's.")],
    prompts: Annotated[
        list[Path] | None, typer.Option(help="JSONL of prompts, or a folder of such, to record traces on; may be repeated.")
    ] = None,
    target: Target = "default",
    chat_template_kwargs: ChatTemplate = None,
    drafter: Drafter = "default",
    count: Count = None,
    max_new_tokens: AnswerTokens = 128,
    temperature: Annotated[float, typer.Option(min=0.0, help="Of the recording; 0 is greedy.")] = 0.0,
    concurrency: Annotated[
        list[int] | None, typer.Option(min=1, help="Concurrent requests; may be repeated. 1, 2, 4, ... 256 when not given.")
    ] = None,
    fixed: Annotated[list[int] | None, typer.Option(min=1, help="Fixed draft lengths; all when not given.")] = None,
    threshold: Annotated[float, typer.Option(min=0.0, max=1.0, help="Static threshold on each confidence.")] = 0.5,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of each simulated server.")] = 300,
    output: Annotated[Path | None, typer.Option(help="JSON file for the results.")] = None,
    pictures: Annotated[Path | None, typer.Option(help="Folder for pictures.")] = None,
    json_output: JsonOutput = False,
) -> None:
    """Simulate serving many requests at once from recorded drafts.

    Says throughput, the speed of one user, and the verification budget, for every way of scheduling.

    \b
    Examples:
      hf-dspark simulate --prompts prompts.jsonl --traces traces.jsonl \\
        --profile load_profile.json --pictures pictures
      hf-dspark simulate --traces traces.jsonl --profile gpu.json
    """
    from .evaluation import draw_simulation, read_prompt_sets
    from .formats.files import write_text
    from .load_profile import LoadProfile
    from .simulation import policies, read_traces, record_traces, sweep, write_traces

    if pictures is not None:
        require_extra("evaluate", "matplotlib")
    curve = LoadProfile.load(profile)
    if curve.draft_seconds == 0:
        print("In this profile drafting costs nothing. Measure it with `hf-dspark profile --drafter`.", file=sys.stderr)
    if prompts:
        model, tokenizer = _load_target(target, chat_template_kwargs)
        options = next(iter(_settings([temperature]).values()))
        conversations = [prompt for texts in read_prompt_sets(prompts, count).values() for prompt in texts]
        draft_model = drafter_by_name(drafter, model)
        write_traces(
            record_traces(model, tokenizer, draft_model, conversations, max_new_tokens=max_new_tokens, **options), traces
        )
    recorded = read_traces(traces)
    longest = max(len(block.confidence) for trace in recorded for block in trace.blocks)
    named = policies(longest, fixed or (), threshold)
    counts = sorted(set(concurrency or [2**n for n in range(9)]))
    results = sweep(recorded, curve, counts, named, rounds)
    if output is not None:
        write_text(output, json.dumps(results, indent=1) + "\n")
    paths = [] if pictures is None else draw_simulation(results, pictures)
    if json_output:
        print(json.dumps(results))
        return
    print("tokens per second, all users (of one user; verified draft tokens per request and round)")
    for name in named:
        print(name)
        for row in results:
            if row["policy"] == name:
                print(f"{row['concurrency']:>6} {row['throughput']:>10.1f} ({row['user_speed']:.1f}; {row['budget']:.2f})")
    for path in paths:
        print(path)


@app.command()
def doctor(
    target: Target = "default",
    chat_template_kwargs: ChatTemplate = None,
    drafter: Drafter = "default",
    prompts: Annotated[
        list[Path] | None, typer.Option(help="JSONL of prompts, or a folder of such; a few built-in ones when not given.")
    ] = None,
    count: Annotated[int, typer.Option(min=1, help="Prompts of each file.")] = 4,
    max_new_tokens: AnswerTokens = 64,
    profile: Annotated[Path | None, typer.Option(help="Load profile to go by; measured when not given.")] = None,
    packed: Annotated[bool, typer.Option("--packed", help="Examine the target with packed linear layers.")] = False,
    json_output: JsonOutput = False,
) -> None:
    """Say where the time goes, whether drafting pays here, and what would help.

    \b
    Examples:
      hf-dspark doctor
      hf-dspark doctor --target my-target --drafter my-drafter --packed
    """
    from .demo.show import PROMPTS
    from .doctor import describe, examine
    from .evaluation import read_prompt_sets
    from .load_profile import LoadProfile
    from .packing import pack_linears

    model, tokenizer = _load_target(target, chat_template_kwargs)
    draft_model = drafter_by_name(drafter, model)
    if packed:
        pack_linears(model)
    texts = [prompt for found in read_prompt_sets(prompts, count).values() for prompt in found] if prompts else PROMPTS
    curve = None if profile is None else LoadProfile.load(profile)
    report = examine(model, tokenizer, draft_model, texts, max_new_tokens=max_new_tokens, profile=curve)
    print(json.dumps(report) if json_output else describe(report))


@app.command()
def inspect(
    checkpoint: Annotated[str, typer.Argument(help="Drafter in any packaging: a folder, a repo id, or 'default'.")],
    target: Annotated[str | None, typer.Option(help="Target to try the drafter on: a folder, a repo id, or 'default'.")] = None,
    json_output: JsonOutput = False,
) -> None:
    """Say how a drafter's files are read, and whether they fit.

    With --target the drafter is tried on it; the exit code is 1 where it does not fit.

    \b
    Examples:
      hf-dspark inspect my-drafter
      hf-dspark inspect my-drafter --target default --json
    """
    from .demo import DRAFTER_FOLDER
    from .formats import packaging_of
    from .formats.files import find_folder
    from .formats.inspection import inspect_checkpoint
    from .modeling_dspark import DSparkDraftModel

    folder = DRAFTER_FOLDER if checkpoint == "default" else find_folder(checkpoint, check=packaging_of)
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
    source: Annotated[str, typer.Argument(help="Drafter in any packaging that is read: a folder, a repo id, or 'default'.")],
    output: Annotated[Path, typer.Argument(help="New folder for the converted drafter.")],
    to: Annotated[Literal["deepspec", "speculators", "dflash"], typer.Option(help="Packaging to write.")],
    target: Annotated[
        str | None,
        typer.Option(help="The drafter's target, which deepspec and speculators need: a folder, a repo id, or 'default'."),
    ] = None,
    json_output: JsonOutput = False,
) -> None:
    """Write a drafter in the packaging of another program.

    \b
    Examples:
      hf-dspark convert my-drafter for-vllm --to speculators \\
        --target Qwen/Qwen3-4B
      hf-dspark convert a-dflash-drafter out --to dflash
    """
    from .formats.export import export_checkpoint

    export_checkpoint(drafter_by_name(source), output, to, None if target is None else target_by_name(target)[0])
    if json_output:
        print(json.dumps({"output": str(output), "packaging": to}))
    else:
        print(f"Drafter written to {output} as {to}.")


def main() -> None:
    """Entry point: one line for an error, and the traceback only with --debug."""
    from huggingface_hub.errors import StrictDataclassError

    arguments = [argument for argument in sys.argv[1:] if argument != "--debug"]
    try:
        app(arguments)
    except Exception as error:
        if len(arguments) < len(sys.argv[1:]):
            raise
        text = " ".join(str(error).split())
        if not isinstance(error, (ValueError, OSError, ImportError, FloatingPointError, StrictDataclassError)):
            text = f"{type(error).__name__}: {text} (--debug shows where)"  # nobody meant the user to see this one
        print(f"hf-dspark: {text}", file=sys.stderr)
        sys.exit(1)
