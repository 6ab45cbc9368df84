"""The command line: help for every command, one run of each, and one line where something is wrong.

`inspect` and `convert` run in test_checkpoints.py and test_formats_export.py.
"""

import json
import re
import shutil
import sys
from types import NoneType
from typing import get_args, get_type_hints

import pytest
import torch
from command_lines import joined_lines, parse
from huggingface_hub import HfApi, ModelCard, RepoUrl
from tiny import MASK, one_thread, tiny_drafter, tiny_target  # noqa: F401  # autouse
from tiny_tokenizer import text, tiny_tokenizer
from typer.testing import CliRunner

from hf_dspark import DSparkDraftModel, LoadProfile, cli
from hf_dspark.demo import show

COMMANDS = [command.callback.__name__ for command in cli.app.registered_commands]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A target with its tokenizer, a drafter for it, and prompts."""
    path = tmp_path_factory.mktemp("models")
    target = tiny_target(seed=1)
    target.save_pretrained(path / "target")
    tiny_tokenizer().save_pretrained(path / "target")
    tiny_drafter(target).save_pretrained(path / "drafter")
    prompts = [text([7 + n, 30, 9]) for n in range(12)]
    (path / "prompts.jsonl").write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
    return path


@pytest.fixture
def answers(folder, tmp_path):
    path = tmp_path / "answers.jsonl"
    lines = [
        {"messages": [{"role": "user", "content": text([7 + n])}, {"role": "assistant", "content": text([8, 9, 10 + n])}]}
        for n in range(12)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def pair_options(folder):
    return ["--target", folder / "target", "--drafter", folder / "drafter"]


def invoke(*arguments):
    """Output of a command that must succeed."""
    result = CliRunner().invoke(cli.app, [str(argument) for argument in arguments])
    assert result.exit_code == 0, (result.output, result.exception)
    return result.output


def failure(monkeypatch, capsys, *arguments):
    """The one line that a failing command says."""
    monkeypatch.setattr(sys, "argv", ["hf-dspark", *(str(argument) for argument in arguments)])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    assert stop.value.code == 1
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("hf-dspark: ")]
    assert len(lines) == 1
    return lines[0].removeprefix("hf-dspark: ")


def run_json(*arguments):
    """What a command prints on stdout with `--json`, which must be JSON and nothing else."""
    result = CliRunner().invoke(cli.app, [*(str(argument) for argument in arguments), "--json"])
    assert result.exit_code == 0, (result.output, result.exception)
    return json.loads(result.stdout)


def test_help():
    output = invoke("--help")
    assert all(f"\n  {command} " in output for command in COMMANDS) and "--debug" in output


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_a_command(command):
    """80 columns, examples that the program itself understands, and the option names that all commands share."""
    output = invoke(command, "--help")
    assert max(map(len, output.splitlines())) <= 80
    _, found, rest = output.partition("Examples:\n")
    assert found, "no examples"
    examples = [line.split("| ")[-1] for line in joined_lines(rest.split("\n\n")[0])]
    assert {parse(line) for line in examples} == {command}
    assert "--json " in output


def test_an_option_is_of_one_kind_in_all_commands():
    kinds = {}
    for command in cli.app.registered_commands:
        for name, hint in get_type_hints(command.callback).items():
            kinds.setdefault(name, []).append({*(get_args(hint) or [hint])} - {NoneType})
    for name in ("target", "max_new_tokens", "batch_size", "top_k", "seed", "output", "count", "json_output"):
        assert len(kinds[name]) > 1 and all(kind == kinds[name][0] for kind in kinds[name]), name
    assert len(kinds["json_output"]) == len(COMMANDS)


@pytest.fixture
def tiny_demo(folder, monkeypatch):
    """The pair that `demo` loads, tiny; its prompts in the words of that target."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    pair = AutoModelForCausalLM.from_pretrained(folder / "target"), AutoTokenizer.from_pretrained(folder / "target")
    monkeypatch.setattr(show, "load_default", lambda: (*pair, DSparkDraftModel.from_pretrained(folder / "drafter")))
    monkeypatch.setattr(show, "PROMPTS", tuple(text([7 + n, 30]) for n in range(3)))


def test_demo(tiny_demo):
    printed = invoke("demo", "--max-new-tokens", 8)
    assert f"> {text([9, 30])}" in printed and "Statistics(tau=" in printed and "All prompts: " in printed
    assert run_json("demo", "--max-new-tokens", 8)["batches"] == 3
    assert CliRunner().invoke(cli.app, ["demo", "--max-new-tokens", "0"]).exit_code == 2


def test_generate_streams_and_compares(folder):
    arguments = ["generate", text([12, 8]), *pair_options(folder), "--max-new-tokens", 16]
    result = CliRunner().invoke(cli.app, [*map(str, arguments), "--plain"])
    assert result.exit_code == 0, (result.output, result.exception)
    heading, drafted, plain_heading, plain = result.stdout.splitlines()
    assert (heading, plain_heading) == ("DSpark:", "plain:") and drafted == plain and drafted.startswith("w")
    assert re.search(r"DSpark: \d+ tokens in .* tokens/s; tau \d\.\d\d; of \d+ drafted tokens", result.stderr)
    assert "Texts: same." in result.stderr
    report = run_json(*arguments, "--plain", "--measure")
    assert report["text"] == report["plain"]["text"] == drafted.strip() and report["match"] == "same"
    assert report["tokens"] <= 16 and report["tau"] >= 1 and report["rejected"] <= report["verified"]


def test_generate_samples(folder):
    arguments = ["generate", text([12, 8]), *pair_options(folder), "--max-new-tokens", 12]
    first, again, other = (run_json(*arguments, "--sample", "--seed", seed)["text"] for seed in (1, 1, 2))
    assert first == again != other
    greedy = run_json(*arguments)["text"]
    for narrow in (("--temperature", 0), ("--top-k", 1), ("--top-p", 0.01)):
        assert run_json(*arguments, "--sample", *narrow)["text"] == greedy
    assert run_json(*arguments, "--sample", "--plain")["match"] == "sampled"


def test_generate_reads_its_prompt_from_anywhere(folder, tmp_path):
    (tmp_path / "prompt.txt").write_text(text([12, 8]))
    options = [*map(str, pair_options(folder)), "--max-new-tokens", "8", "--json"]
    given = run_json("generate", text([12, 8]), *options[:-1])["text"]
    assert run_json("generate", "--file", tmp_path / "prompt.txt", *options[:-1])["text"] == given
    for dash in ([], ["-"]):
        result = CliRunner().invoke(cli.app, ["generate", *dash, *options], input=text([12, 8]))
        assert json.loads(result.stdout)["text"] == given
    raw = run_json("generate", text([12, 8]), "--raw", *options[:-1])["text"]
    assert raw and raw != given


def test_train(folder, answers, tmp_path):
    output = tmp_path / "drafter"
    printed = invoke(
        "train", "--data", answers, "--output", output, "--target", folder / "target", "--steps", 2, "--batch-size", 2,
        "--num-anchors", 2, "--layers", 1, "--block-size", 3, "--markov-rank", 4, "--head", "rnn", "--save-every", 1,
        "--draft-vocabulary", 20,
    )  # fmt: skip
    assert f"Drafter saved to {output}." in printed
    drafter = DSparkDraftModel.from_pretrained(output)
    config = drafter.config
    assert (config.num_hidden_layers, config.block_size, config.markov_rank, config.markov_head_type) == (1, 3, 4, "rnn")
    assert (config.draft_vocab_size, config.mask_token_id) == (20, MASK)
    assert {path.name for path in output.glob("checkpoint-*")} == {"checkpoint-1", "checkpoint-2"}

    again = tmp_path / "again"
    report = run_json(
        "train", "--data", answers, "--output", again, "--target", folder / "target", "--drafter", output,
        "--steps", 1, "--batch-size", 2, "--optimizer", "host", "--save-every", 1,
    )  # fmt: skip
    assert report["output"] == str(again) and report["steps"] == 1 and report["tau"] >= 1
    assert DSparkDraftModel.from_pretrained(again).config.markov_head_type == "rnn"

    # A published drafter is in half precision and calibrated; what goes on from it is neither.
    published = DSparkDraftModel.from_pretrained(output, dtype=torch.float16)
    published.config.confidence_temperatures = published.config.greedy_confidence_temperatures = [2.0, 1.0, 0.5]
    published.save_pretrained(tmp_path / "published")
    invoke(
        "train", "--data", answers, "--output", tmp_path / "next", "--target", folder / "target", "--drafter",
        tmp_path / "published", "--steps", 3, "--batch-size", 2,
    )  # fmt: skip
    trained = DSparkDraftModel.from_pretrained(tmp_path / "next")
    assert trained.dtype == torch.float32 and not trained.config.is_calibrated
    assert any(not torch.equal(a, b.float()) for a, b in zip(trained.parameters(), published.parameters(), strict=True))


def test_average(folder, tmp_path, monkeypatch, capsys):
    printed = invoke(
        "average", folder / "drafter", folder / "drafter", "--output", tmp_path / "mean", "--weight", 1, "--weight", 2
    )
    assert f"Drafter saved to {tmp_path / 'mean'}." in printed
    twice = ["average", folder / "drafter", folder / "drafter", "--output"]
    assert "holds something already" in failure(monkeypatch, capsys, *twice, folder / "drafter")
    mean, drafter = (DSparkDraftModel.from_pretrained(path) for path in (tmp_path / "mean", folder / "drafter"))
    for value, expected in zip(mean.parameters(), drafter.parameters(), strict=True):
        torch.testing.assert_close(value, expected)


def test_train_as_wished(folder, answers, tmp_path, caplog):
    """What DFlash trains, in less memory; then calibrated, which going on makes void."""
    output = tmp_path / "drafter"
    arguments = [
        "train", "--data", answers, "--output", output, "--target", folder / "target", "--batch-size", 2, "--num-anchors", 2,
        "--layers", 1, "--block-size", 3, "--key-value-heads", 2, "--sliding-window", 6, "--no-sample-from-anchor",
        "--cross-entropy-weight", 1, "--distance-weight", 0, "--loss-decay", 2, "--max-logit-positions", 4, "--save-every", 1,
        "--bf16",
    ]  # fmt: skip
    invoke(*arguments, "--steps", 1)
    drafter = DSparkDraftModel.from_pretrained(output)
    config = drafter.config
    assert (config.num_key_value_heads, config.sliding_window, config.sample_from_anchor) == (2, 6, False)
    config.confidence_temperatures = [2.0, 1.0]
    drafter.save_pretrained(output)
    invoke(*arguments, "--steps", 2, "--resume")
    assert "What was calibrated since the last checkpoint is dropped: calibrate the drafter again." in caplog.text
    assert not DSparkDraftModel.from_pretrained(output).config.is_calibrated


def test_arguments_of_the_chat_template(folder, tmp_path, monkeypatch, capsys):
    """They reach the template, which here asks for one, whatever the target makes of the prompt."""
    asking = tmp_path / "target"
    shutil.copytree(folder / "target", asking)
    template = asking / "chat_template.jinja"
    template.write_text("{% if not mark %}{{ raise_exception('no mark given') }}{% endif %}" + template.read_text())
    arguments = ["generate", text([12, 8]), "--target", asking, "--drafter", folder / "drafter", "--max-new-tokens", 4]
    assert "no mark given" in failure(monkeypatch, capsys, *arguments)
    assert "no mark given" in failure(monkeypatch, capsys, *arguments, "--chat-template-kwargs", "{}")
    assert run_json(*arguments, "--chat-template-kwargs", '{"mark": true}')["tokens"]
    for wrong in ("no JSON", "[1]"):
        result = CliRunner().invoke(cli.app, [*map(str, arguments), "--chat-template-kwargs", wrong])
        assert result.exit_code == 2 and "must be a JSON object" in result.output
    prompts = ["--prompts", folder / "prompts.jsonl", "--output", tmp_path / "out.jsonl", "--target", asking]
    assert "no mark given" in failure(monkeypatch, capsys, "regenerate", *prompts, "--max-new-tokens", 4)
    invoke("regenerate", *prompts, "--max-new-tokens", 4, "--chat-template-kwargs", '{"mark": true}')
    for command in ("train", "regenerate", "synthesize", "evaluate", "calibrate", "simulate", "doctor"):
        assert "--chat-template-kwargs JSON" in invoke(command, "--help")


def test_regenerate(folder, tmp_path):
    output = tmp_path / "answers.jsonl"
    arguments = ["regenerate", "--prompts", folder / "prompts.jsonl", "--output", output, "--target", folder / "target"]
    arguments += ["--max-new-tokens", 5, "--batch-size", 4]
    assert f"12 answers added to {output}." in invoke(*arguments)
    assert f"12 answers added to {output}." in invoke(*arguments, "--samples", 2, "--temperature", 0)
    records = [json.loads(line) for line in output.read_text().splitlines()]
    assert [record["temperature"] for record in records] == [1.0] * 12 + [0.0] * 12
    assert all(1 <= len(record["answer_ids"]) <= 5 for record in records)
    assert run_json(*arguments) == {"output": str(output), "written": 0}


def test_synthesize(folder, tmp_path):
    output = tmp_path / "prompts.jsonl"
    printed = invoke("synthesize", "--output", output, "--target", folder / "target", "--count", 3, "--max-new-tokens", 40)
    lines = output.read_text().splitlines()
    assert f"{len(lines)} prompts added to {output}" in printed
    assert all(json.loads(line)["prompt"] for line in lines)
    report = run_json("synthesize", "--output", output, "--target", folder / "target", "--count", len(lines))
    assert report["written"] == 0 and report["output"] == str(output)


def test_profile(folder, tmp_path):
    output = tmp_path / "load_profile.json"
    arguments = [*pair_options(folder), "--context-length", 16]
    printed = invoke("profile", "--output", output, *arguments)
    assert len(re.findall(r"^ +(\d+|draft) +\d+\.\d\d$", printed, flags=re.MULTILINE)) == 16
    report = run_json("profile", "--output", output, *arguments)
    measured, milliseconds = LoadProfile.load(output), report["milliseconds"]
    assert report["draft_milliseconds"] == pytest.approx(1e3 * measured.draft_seconds, abs=0.01)
    assert milliseconds.keys() == {str(size) for size in measured.steps_per_second}
    assert milliseconds["1"] == pytest.approx(1e3 * measured.step_seconds(1), abs=0.01)
    assert measured.draft_seconds > 0 and measured.measured_on["linears"] == "plain"
    invoke("profile", "--output", output, *arguments, "--packed")
    assert LoadProfile.load(output).measured_on["linears"] == "packed"


def test_simulate(folder, tmp_path):
    LoadProfile({1: 50.0, 2: 49.0, 64: 20.0}, draft_seconds=0.002).save(tmp_path / "profile.json")
    traces = tmp_path / "traces.jsonl"
    arguments = ["simulate", "--traces", traces, "--profile", tmp_path / "profile.json", "--concurrency", 4, "--fixed", 3]
    recording = ["--prompts", folder / "prompts.jsonl", "--count", 3, "--max-new-tokens", 20, *pair_options(folder)]
    printed = invoke(*arguments, *recording, "--rounds", 30, "--pictures", tmp_path / "pictures")
    policies = ["plain", "fixed 3", "threshold 0.5", "early_stop", "two_step", "presampled"]
    assert [line for line in printed.splitlines() if line in policies] == policies
    assert len(traces.read_text().splitlines()) == 3
    assert {path.name for path in (tmp_path / "pictures").iterdir()} == {"throughput.png", "budget.png"}
    results = json.loads(invoke(*arguments, "--rounds", 30, "--json", "--output", tmp_path / "results.json"))
    assert results == json.loads((tmp_path / "results.json").read_text())
    assert [(row["policy"], row["concurrency"]) for row in results] == [(policy, 4) for policy in policies]


def test_doctor(folder, tmp_path):
    LoadProfile({1: 50.0, 2: 49.0, 64: 20.0}, draft_seconds=0.002).save(tmp_path / "profile.json")
    arguments = ["doctor", *pair_options(folder), "--prompts", folder / "prompts.jsonl", "--count", 2]
    arguments += ["--max-new-tokens", 16, "--profile", tmp_path / "profile.json"]
    printed = invoke(*arguments)
    assert printed.startswith("Time: prefill ") and "- The drafter has no load profile" in printed
    report = json.loads(invoke(*arguments, "--json"))
    assert len(report["lengths"]) == 5 and "no profile" in {finding["name"] for finding in report["findings"]}


def test_evaluate(folder, tmp_path):
    arguments = ["evaluate", "--prompts", folder / "prompts.jsonl", *pair_options(folder)]
    arguments += ["--count", 3, "--max-new-tokens", 12, "--output", tmp_path / "new" / "results.json"]
    printed = invoke(*arguments, "--pictures", tmp_path / "pictures")
    lines = [line.split() for line in printed.splitlines() if line.startswith("T=")]
    rows = json.loads((tmp_path / "new" / "results.json").read_text())
    assert [line[:3] for line in lines] == [[row["setting"], "prompts", f"{row['tau']:.2f}"] for row in rows]
    assert [row["setting"] for row in rows] == ["T=0", "T=1"]
    assert {path.name for path in (tmp_path / "pictures").iterdir()} == {"acceptance.png", "thresholds.png", "reliability.png"}
    (only,) = json.loads(invoke(*arguments, "--temperature", 0.5, "--json").splitlines()[-1])
    assert only["setting"] == "T=0.5" and sum(only["match"].values()) == 3


@pytest.mark.parametrize(
    ("command", "missing"),
    [
        (["evaluate"], "sklearn"),
        (["evaluate", "--pictures", "pictures"], "matplotlib"),
        (["calibrate", "--output", "calibrated"], "scipy"),
        (["simulate", "--traces", "traces.jsonl", "--profile", "profile.json", "--pictures", "pictures"], "matplotlib"),
    ],
)
def test_a_missing_extra_is_named_before_anything_is_done(command, missing, folder, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, missing, None)
    message = failure(monkeypatch, capsys, *command, "--prompts", folder / "prompts.jsonl", *pair_options(folder))
    assert f"this needs {missing}, which is not installed: in a clone, pip install '.[evaluate]'" in message


def test_calibrate(folder, tmp_path, monkeypatch, capsys):
    arguments = ["calibrate", "--prompts", folder / "prompts.jsonl", *pair_options(folder)]
    arguments += ["--max-new-tokens", 24, "--output", tmp_path / "calibrated", "--sts", tmp_path / "sts.json"]
    printed = invoke(*arguments)
    assert f"Drafter saved to {tmp_path / 'calibrated'}." in printed
    config = DSparkDraftModel.from_pretrained(tmp_path / "calibrated").config
    found = json.loads(invoke(*arguments, "--json").splitlines()[-1])
    assert found.keys() == {"greedy", "sampled"}
    for greedy, values in ((True, found["greedy"]), (False, found["sampled"])):
        assert config.calibration(greedy) == (values["temperatures"], values["offsets"], values["log_odds_weights"])
    assert len(found["greedy"]["log_odds_weights"]) == 5 and found["sampled"]["log_odds_weights"] is None
    assert len(json.loads((tmp_path / "sts.json").read_text())["temperatures"]) == 5
    assert "--sts" in failure(monkeypatch, capsys, *arguments, "--temperature", 0)

    again = ["calibrate", "--prompts", folder / "prompts.jsonl", "--target", folder / "target", "--max-new-tokens", 8]
    again += ["--drafter", tmp_path / "calibrated", "--output", tmp_path / "calibrated"]
    invoke(*again, "--temperature", 0)
    changed = DSparkDraftModel.from_pretrained(tmp_path / "calibrated").config
    assert changed.calibration(greedy=True) != config.calibration(greedy=True)
    assert changed.calibration(greedy=False) == config.calibration(greedy=False)
    foreign = tmp_path / "foreign"
    invoke("convert", tmp_path / "calibrated", foreign, "--to", "speculators", "--target", folder / "target")
    before = {path: path.read_bytes() for path in foreign.iterdir()}
    message = failure(monkeypatch, capsys, *again[:-4], "--drafter", foreign, "--output", foreign)
    assert "in another packaging, which has no place for calibration" in message
    assert {path: path.read_bytes() for path in foreign.iterdir()} == before


def test_calibrate_on_blocks_that_are_all_short(folder, tmp_path):
    """Positions that no block reaches have a calibration, that of the one before, and no error to tell."""
    arguments = ["calibrate", "--prompts", folder / "prompts.jsonl", *pair_options(folder)]
    arguments += ["--max-new-tokens", 4, "--output", tmp_path / "calibrated"]
    lines = invoke(*arguments).splitlines()
    assert [line.split()[-2:] for line in lines if line.split()[:1] == ["5"]] == [["-", "-"]] * 2
    printed = invoke(*arguments, "--json").splitlines()[-1]
    assert "NaN" not in printed and json.loads(printed)["greedy"]["ece_after"][-1] is None


def test_card(folder, tmp_path):
    drafter, results = tmp_path / "my-drafter", tmp_path / "results.json"
    shutil.copytree(folder / "drafter", drafter)
    invoke(
        "evaluate", "--prompts", folder / "prompts.jsonl", "--target", folder / "target", "--drafter", drafter,
        "--count", 2, "--max-new-tokens", 12, "--output", results,
    )  # fmt: skip
    (tmp_path / "notes.md").write_text("## Training\n\nNone at all.\n")
    invoke(
        "card", "--drafter", drafter, "--base-model", "user/target", "--results", results, "--license", "mit",
        "--dataset", "user/prompts", "--notes", tmp_path / "notes.md",
    )  # fmt: skip
    assert run_json("card", "--drafter", folder / "drafter", "--base-model", "user/target") == {
        "output": str(folder / "drafter" / "README.md")
    }
    card = ModelCard.load(drafter / "README.md")
    assert (card.data.base_model, card.data.license, card.data.datasets) == ("user/target", "mit", ["user/prompts"])
    rows = json.loads(results.read_text())
    assert [result.metric_value for result in card.data.eval_results] == [round(row["tau"], 3) for row in rows]
    assert [result.dataset_config for result in card.data.eval_results] == ["T=0", "T=1"]
    for row in rows:
        assert f"| {row['setting']} | prompts | {row['tau']:.2f} |" in card.text
    for fact in (
        "# my-drafter",
        "drafts of 5 tokens",
        "a vanilla sequential head of rank 48",
        "None at all.",
        "not calibrated",
    ):
        assert fact in card.text, fact


def test_push_uploads_what_loads(folder, tmp_path, monkeypatch, capsys):
    calls = []
    monkeypatch.setattr(
        HfApi,
        "create_repo",
        lambda self, repo_id, **options: calls.append(options) or RepoUrl(f"https://huggingface.co/{repo_id}"),
    )
    monkeypatch.setattr(HfApi, "upload_folder", lambda self, **options: calls.append(options))
    assert "https://huggingface.co/user/mine" in invoke("push", "--drafter", folder / "drafter", "--repo-id", "user/mine")
    made, sent = calls
    assert made == {"private": False, "exist_ok": True}
    assert sent["repo_id"] == "user/mine" and sent["folder_path"] == folder / "drafter"
    broken = tmp_path / "broken"
    shutil.copytree(folder / "drafter", broken)
    (broken / "model.safetensors").write_bytes(b"no")
    assert "model.safetensors" in failure(monkeypatch, capsys, "push", "--drafter", broken, "--repo-id", "user/mine")
    for command in (["push", "--repo-id", "user/mine"], ["card", "--base-model", "user/target"]):
        said = failure(monkeypatch, capsys, *command, "--drafter", tmp_path / "nowhere")
        assert "`--drafter` must be a folder here" in said and not (tmp_path / "nowhere").exists()
    assert len(calls) == 2
    report = run_json("push", "--drafter", folder / "drafter", "--repo-id", "user/mine", "--private")
    assert report == {"url": "https://huggingface.co/user/mine"} and calls[2]["private"] is True


def test_failures_say_one_line(folder, answers, tmp_path, monkeypatch, capsys):
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"prompt": 7}\n')
    output, target = tmp_path / "out.jsonl", folder / "target"

    def fails(*arguments):
        return failure(monkeypatch, capsys, *arguments)

    regenerate = ("regenerate", "--output", output, "--target")
    assert f'{bad}, line 1: expected {{"prompt": "..."}}' in fails(*regenerate, target, "--prompts", bad)
    assert "missing.jsonl" in fails(*regenerate, target, "--prompts", tmp_path / "missing.jsonl")
    assert "no/target" in fails(*regenerate, "no/target", "--prompts", bad)
    train = ("train", "--output", output, "--target", target, "--data", answers)
    assert f"{bad}, line 1: expected" in fails(*train, "--data", bad)
    assert "`mask_token_id` 8 ('w8') occurs in the training text" in fails(*train, "--mask-token-id", 8)
    assert "`draft_vocab_size` must lie between 1 and `vocab_size` (48)" in fails(*train, "--draft-vocabulary", 99)
    nowhere = tmp_path / "nowhere"
    assert str(nowhere) in fails(*train, "--drafter", nowhere)
    assert str(nowhere) in fails("profile", "--output", output, "--target", target, "--drafter", nowhere)
    assert f"{bad}, line 1: expected" in fails("evaluate", "--prompts", bad, *pair_options(folder))
    assert str(nowhere) in fails("calibrate", "--prompts", bad, "--output", nowhere, "--target", target, "--drafter", nowhere)
    assert "temperature" in fails("synthesize", "--output", output, "--count", 1, "--target", target, "--temperature", 0)
    card = ("card", "--drafter", folder / "drafter", "--base-model", "user/target")
    assert f"{bad}: expected the JSON that `hf-dspark evaluate --output` writes" in fails(*card, "--results", bad)
    assert str(nowhere) in fails("inspect", nowhere)
    assert "holds something already" in fails("convert", folder / "drafter", folder / "target", "--to", "dflash")
    assert "the prompt is empty" in fails("generate", " ", *pair_options(folder))
    assert str(nowhere) in fails("generate", "w7", "--target", target, "--drafter", nowhere)
    assert str(nowhere) in fails("generate", "--file", nowhere)
    latin = tmp_path / "latin.txt"
    latin.write_bytes("café".encode("latin-1"))
    assert f"{latin} must be text in UTF-8" in fails("generate", "--file", latin)
    assert f"{latin} must be text in UTF-8" in fails(*card, "--notes", latin)
    assert not output.exists()


def test_options_out_of_range_are_refused(folder, answers, tmp_path):
    for arguments in (("--steps", "0"), ("--head", "other"), ("--optimizer", "adam"), ("--markov-rank", "-1")):
        command = ["train", "--data", str(answers), "--output", str(tmp_path / "out"), *arguments]
        result = CliRunner().invoke(cli.app, command)
        assert result.exit_code == 2 and arguments[0] in result.output


def test_generate_refuses_what_contradicts_itself(folder):
    for arguments, reason in (
        (["w7", "--temperature", "0.5"], "--temperature needs --sample"),
        (["w7", "--top-p", "0.5"], "--top-p needs --sample"),
        (["w7", "--file", "prompt.txt"], "not both"),
    ):
        result = CliRunner().invoke(cli.app, ["generate", *arguments])
        assert result.exit_code == 2 and reason in " ".join(result.output.split())


def test_a_target_without_chat_template(folder, tmp_path, monkeypatch, capsys):
    shutil.copytree(folder / "target", tmp_path / "base")
    (tmp_path / "base" / "chat_template.jinja").unlink()
    arguments = ["generate", text([12]), "--target", tmp_path / "base", "--drafter", folder / "drafter"]
    assert "has no chat template" in failure(monkeypatch, capsys, *arguments)
    assert run_json(*arguments, "--raw", "--max-new-tokens", 4)["tokens"] <= 4


def test_debug_shows_the_traceback(folder, tmp_path, monkeypatch, capsys):
    command = ["regenerate", "--output", "x", "--target", str(folder / "target"), "--prompts", "missing.jsonl"]
    monkeypatch.chdir(tmp_path)
    for place in (0, len(command)):
        monkeypatch.setattr(sys, "argv", ["hf-dspark", *command[:place], "--debug", *command[place:]])
        with pytest.raises(FileNotFoundError):
            cli.main()


def test_an_error_that_nobody_expected_is_one_line_too(folder, monkeypatch, capsys):
    monkeypatch.setattr(cli, "drafter_by_name", lambda *_: 1 / 0)
    said = failure(monkeypatch, capsys, "push", "--drafter", folder / "drafter", "--repo-id", "user/mine")
    assert said == "ZeroDivisionError: division by zero (--debug shows where)"
