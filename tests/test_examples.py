"""Every example, run at tiny size: a target, its tokenizer and a drafter made here."""

import json
import runpy
from pathlib import Path

import pytest
import torch
from tiny import one_thread, tiny_drafter, tiny_target  # noqa: F401  # autouse
from tiny_tokenizer import text, tiny_tokenizer

from hf_dspark import DSparkDraftModel, LoadProfile

EXAMPLES = Path(__file__).parents[1] / "examples"
PROMPT = text([12, 8])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A target with its tokenizer, and a drafter for it."""
    path = tmp_path_factory.mktemp("models")
    tokenizer = tiny_tokenizer()
    # Unused ones: the mask token must be a token that this talkative target never says.
    tokenizer.add_tokens([f"<unused{n}>" for n in range(8)], special_tokens=True)
    target = tiny_target("qwen3", vocab_size=len(tokenizer))
    target.save_pretrained(path / "target")
    tokenizer.save_pretrained(path / "target")
    tiny_drafter(target).save_pretrained(path / "drafter")
    return path


def run(name, folder, *arguments):
    """Calls an example's `main` with the tiny pair."""
    main = runpy.run_path(str(EXAMPLES / f"{name}.py"))["main"]
    main(["--target", str(folder / "target"), "--drafter", str(folder / "drafter"), *map(str, arguments)])


def test_each_names_its_command_and_is_run_here():
    names = sorted(path.stem for path in EXAMPLES.glob("*.py"))
    assert names == ["batch", "chat_streaming", "load_profile", "quickstart", "train_your_own"]
    for name in names:
        source = (EXAMPLES / f"{name}.py").read_text()
        assert f"    python examples/{name}.py" in source and "--target" in source and "--drafter" in source


def test_quickstart(folder, capsys):
    run("quickstart", folder, "--prompt", PROMPT, "--max-new-tokens", 12)
    answer, statistics = capsys.readouterr().out.splitlines()
    assert answer.startswith("w") and statistics.startswith("Statistics(tau=")


def test_chat_streaming(folder, capsys, monkeypatch):
    said = iter([PROMPT, text([9]), ""])
    monkeypatch.setattr("builtins.input", lambda prompt: next(said))
    run("chat_streaming", folder, "--max-new-tokens", 8)
    assert capsys.readouterr().out.count("tokens per pass") == 2
    assert next(said, None) is None


def test_batch(folder, capsys):
    run("batch", folder, "--prompts", PROMPT, text([7, 30, 9]), "--max-new-tokens", 12, "--requests", 64)
    output = capsys.readouterr().out
    assert "planned for 2 requests" in output and "planned for 64 requests" in output and f"> {PROMPT}\nw" in output


def test_load_profile(folder, capsys, tmp_path):
    run("load_profile", folder, "--repeats", 1, "--output", tmp_path / "profile.json")
    assert "64 requests:" in capsys.readouterr().out
    assert LoadProfile.load(tmp_path / "profile.json").draft_seconds > 0


def test_train_your_own(folder, capsys, tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": text([7 + n, 30])}) + "\n" for n in range(6)))
    main = runpy.run_path(str(EXAMPLES / "train_your_own.py"))["main"]
    options = ["--target", folder / "target", "--prompts", prompts, "--answer-tokens", 8, "--draft-vocabulary", 32]
    main([*map(str, options), "--steps", "2", "--output", str(tmp_path / "mine")])
    assert "Drafter saved" in capsys.readouterr().out
    assert len((tmp_path / "mine" / "answers.jsonl").read_text().splitlines()) == 6
    trained = DSparkDraftModel.from_pretrained(tmp_path / "mine")
    assert trained.config.block_size == 5 and trained.config.draft_vocab_size == 32
    assert all(torch.isfinite(weight).all() for weight in trained.parameters())
