"""The model card: metadata that the Hub's client reads back, and nothing in the text that does not work."""

import json
import re
import shlex

import pytest
from huggingface_hub import ModelCard
from huggingface_hub.repocard_data import model_index_to_eval_results
from huggingface_hub.utils import validate_repo_id
from packagings import GEMMA4, make_drafter, make_target
from typer.main import get_command

from hf_dspark import DSparkDraftModel, LoadProfile, cli
from hf_dspark.card import model_card, training_facts
from hf_dspark.formats.export import export_checkpoint

BLOCK = re.compile(r"```(python|bash)\n(.*?)\n```", re.DOTALL)
RESULTS = [
    {
        "setting": setting,
        "prompts": prompts,
        "tau": 2.34567,
        "reliability": [{"conditional": rate} for rate in (0.7, 0.6, None, 0.5)],
    }
    for setting in ("T=0", "T=1")
    for prompts in ("gsm8k", "mbpp", "all")
]
DRAFTERS = {
    "deepspec": ({}, ["speculators", "deepspec"]),
    "reduced vocabulary": ({"draft_vocab_size": 20}, ["speculators"]),
    "bonus anchor": ({"sample_from_anchor": False}, ["speculators"]),
    "dflash": ({"sample_from_anchor": False, "markov_rank": 0, "enable_confidence_head": False}, ["dflash", "dflash"]),
}


def test_metadata_comes_back(tmp_path):
    drafter = make_drafter()
    card = model_card(
        drafter, "someone/drafter", "someone/target", results=RESULTS, license="mit", datasets=["someone/prompts"]
    )
    card.save(tmp_path / "README.md")
    data = ModelCard.load(tmp_path / "README.md", ignore_metadata_errors=False).data
    assert data.to_dict() == card.data.to_dict()
    for repo_id in (data.base_model, *data.datasets):
        validate_repo_id(repo_id)
    name, results = model_index_to_eval_results(data.to_dict()["model-index"])
    assert name == "someone/drafter" and data.library_name == "transformers" and data.license == "mit"
    found = [(result.dataset_name, result.dataset_config, result.metric_type, result.metric_value) for result in results]
    assert found == [
        (prompts, setting, "accepted_length", 2.346) for setting in ("T=0", "T=1") for prompts in ("gsm8k", "mbpp")
    ]
    assert "model_name" not in model_card(drafter, "someone/drafter", "someone/target").data.to_dict()


def test_results_of_another_drafter_are_refused():
    with pytest.raises(ValueError, match="the results are of drafts of 4 tokens, and this drafter's have 2"):
        model_card(make_drafter(block_size=2), "someone/drafter", "someone/target", results=RESULTS)


@pytest.mark.parametrize("name", DRAFTERS)
def test_what_it_says_works(tmp_path, name):
    """Its Python compiles, its commands parse, and every form it offers to write can be written."""
    changes, packagings = DRAFTERS[name]
    drafter, target = make_drafter(**changes), make_target()
    results = [row | {"reliability": row["reliability"][: drafter.config.num_draft_tokens]} for row in RESULTS]
    text = model_card(drafter, "someone/drafter", "someone/target", results=results).text
    blocks = BLOCK.findall(text)
    for language, block in blocks:
        if language == "python":
            compile(block, "card", "exec")
        assert max(map(len, block.splitlines())) < 100  # or a reader has to scroll
    commands = [shlex.split(line) for language, block in blocks if language == "bash" for line in _lines(block)]
    offered = []
    for words in commands:
        if words[0] == "hf-dspark":
            options = get_command(cli.app).commands[words[1]].make_context(words[1], words[2:]).params
            assert (options["source"], options["target"]) == ("someone/drafter", "someone/target")
            offered.append(options["to"])
            export_checkpoint(drafter, tmp_path / str(options["output"]), options["to"], target)
    assert offered == packagings
    (vllm,) = [words for words in commands if words[0] == "vllm"]
    assert json.loads(vllm[-1]) == {
        "method": "dflash" if name == "dflash" else "dspark",
        "model": "for-vllm",
        "num_speculative_tokens": drafter.config.num_draft_tokens,
    }
    assert ("SGLang reads DeepSpec's form" in text) == (len(packagings) == 1)


def test_files_that_are_not_there_are_not_promised(tmp_path):
    export_checkpoint(make_drafter(), tmp_path / "deepspec", "deepspec", make_target())
    drafter = DSparkDraftModel.from_pretrained(tmp_path / "deepspec")
    text = model_card(drafter, "someone/drafter", "someone/target").text
    assert "trust_remote_code" not in text and "Python files" not in text
    drafter.save_pretrained(tmp_path / "own")
    saved = DSparkDraftModel.from_pretrained(tmp_path / "own")
    assert "trust_remote_code" in model_card(saved, "someone/drafter", "someone/target").text


def _lines(block):
    return block.replace("\\\n", " ").splitlines()


def test_calibration_and_profile_are_told():
    drafter = make_drafter()
    assert "not calibrated. No load profile" in model_card(drafter, "a/b", "c/d").text
    drafter.config.confidence_temperatures, drafter.load_profile = [1.0, 1.5, 2.0, 2.5], LoadProfile({1: 40.0})
    text = model_card(drafter, "a/b", "c/d").text
    assert "calibrated on rollouts" in text and "of the machine it was measured on" in text
    assert "no place for calibration" in text


def test_gemma4_is_offered_what_can_be_written():
    drafter = make_drafter(**GEMMA4)
    text = model_card(drafter, "someone/drafter", "someone/target").text
    assert "--to deepspec" in text and "vllm" not in text and "speculators" not in text


def test_training_facts(tmp_path):
    assert training_facts(tmp_path) == ""
    (tmp_path / "checkpoint-7").mkdir()
    state = {"global_step": 7, "epoch": 0.5, "log_history": [{"step": 5, "loss": 1.0}]}
    (tmp_path / "checkpoint-7" / "trainer_state.json").write_text(json.dumps(state))
    assert training_facts(tmp_path) == "7 steps, 0.5 passes over the text."
    history = [{"step": 10 * n, "epoch": n / 4, "eval_tau": 1 + n / 10, "eval_tau_greedy": 1 + n / 8} for n in range(1, 9)]
    for step in (9, 80):
        (tmp_path / f"checkpoint-{step}").mkdir()
        state = {"global_step": step, "epoch": step / 40, "log_history": [{"step": 5, "loss": 1.0}, *history[: step // 10]]}
        (tmp_path / f"checkpoint-{step}" / "trainer_state.json").write_text(json.dumps(state))
    facts = training_facts(tmp_path)
    assert facts.startswith("80 steps, 2.0 passes over the text.\n")
    for best, told in ((1.8, True), (0.9, False)):  # of τ; of the loss
        (tmp_path / "checkpoint-80" / "trainer_state.json").write_text(json.dumps(state | {"best_metric": best}))
        assert ("with the highest τ on conversations kept out of training was saved" in training_facts(tmp_path)) == told
    rows = [line for line in facts.splitlines() if line.startswith("| ") and "step" not in line]
    assert len(rows) == 6 and rows[0] == "| 10 | 0.2 | 1.10 | 1.12 |" and rows[-1] == "| 80 | 2.0 | 1.80 | 2.00 |"
