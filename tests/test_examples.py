"""Every example, run at tiny size: a target, its tokenizer and a drafter made here."""

import json
import runpy
import sys
from pathlib import Path
from types import SimpleNamespace

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
    assert names == [
        "batch", "calibrate", "chat_streaming", "load_profile", "quickstart", "read_hub_drafter", "train_your_own",
        "write_for_vllm",
    ]  # fmt: skip
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


def test_calibrate(folder, capsys, tmp_path):
    prompts = tmp_path / "held_out.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": text([7 + n, 30])}) + "\n" for n in range(3)))
    run("calibrate", folder, "--prompts", prompts, "--max-new-tokens", 16, "--output", tmp_path / "calibrated")
    assert "greedy, " in capsys.readouterr().out
    config = DSparkDraftModel.from_pretrained(tmp_path / "calibrated").config
    assert config.calibration(greedy=True) != config.calibration(greedy=False) != (None, None)
    run("calibrate", folder, "--prompts", prompts, "--max-new-tokens", 4, "--output", tmp_path / "short")
    assert "   5        -        -" in capsys.readouterr().out


def test_read_hub_drafter(folder, capsys):
    run("read_hub_drafter", folder, "--prompt", PROMPT, "--max-new-tokens", 12)
    assert "5 tokens a block" in (output := capsys.readouterr().out) and "Statistics(tau=" in output


def test_write_for_vllm(folder, capsys, tmp_path):
    run("write_for_vllm", folder, "--output", tmp_path / "for-vllm")
    assert f"vllm serve {tmp_path / 'for-vllm'}" in capsys.readouterr().out
    described = json.loads((tmp_path / "for-vllm" / "config.json").read_text())
    assert described["speculators_model_type"] == "dspark"


def test_pictures_notebook(folder, monkeypatch, tmp_path):
    """The cells in order, as a kernel would run them; outputs are not kept in the repository."""
    cells = [cell for cell in json.loads((EXAMPLES / "pictures.ipynb").read_text())["cells"] if cell["cell_type"] == "code"]
    assert not any(cell["outputs"] for cell in cells)
    shown = []
    monkeypatch.setitem(sys.modules, "IPython.display", SimpleNamespace(Image=lambda path, width: shown.append(path)))
    monkeypatch.chdir(tmp_path)
    namespace = {}
    for number, cell in enumerate(cells):
        exec(compile("".join(cell["source"]), f"pictures.ipynb, cell {number}", "exec"), namespace)
        if number == 0:  # the settings, made tiny
            namespace |= {"TARGET": str(folder / "target"), "DRAFTER": str(folder / "drafter"), "MAX_NEW_TOKENS": 8}
            namespace["PROMPTS"] = {"one": [PROMPT], "two": [text([7, 30])]}
    assert [path.stem for path in shown] == ["acceptance", "thresholds", "reliability"] and all(map(Path.exists, shown))
