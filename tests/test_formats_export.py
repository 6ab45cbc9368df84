"""Writing foreign packagings: they hold what is listed for them, read back alike, and twice give the same bytes."""

import json
import sys

import pytest
import torch
from packagings import assert_same, draft, make_drafter, make_target, write_dflash, write_specforge, write_speculators
from safetensors.torch import load_file
from tiny import one_thread, tiny_drafter, tiny_target  # noqa: F401
from tiny_tokenizer import tiny_tokenizer
from transformers import Qwen3ForCausalLM
from typer.testing import CliRunner

from hf_dspark import DSparkDraftModel, cli
from hf_dspark.errors import CheckpointError
from hf_dspark.formats.export import export_checkpoint

FILES = ("config.json", "model.safetensors")
HEADS = {"markov_rank", "markov_head_type", "enable_confidence_head", "confidence_head_with_markov"}
PARALLEL = dict(markov_rank=0, enable_confidence_head=False, sample_from_anchor=False)


@pytest.fixture(scope="module")
def target() -> Qwen3ForCausalLM:
    return make_target()


def content(folder) -> tuple[dict, dict[str, torch.Tensor]]:
    return json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")


@pytest.mark.parametrize(
    ("packaging", "changes"),
    [
        ("deepspec", {}),
        ("deepspec", dict(markov_head_type="gated", confidence_head_with_markov=False)),
        ("deepspec", dict(sliding_window=9)),
        ("speculators", dict(markov_head_type="rnn")),
        ("speculators", dict(sample_from_anchor=False, target_layer_ids=[-1, 0])),
        ("speculators", dict(draft_vocab_size=20)),
        ("speculators", PARALLEL | dict(sliding_window=9)),
        ("dflash", PARALLEL),
    ],
    ids=str,
)
def test_written_read_and_written_again(tmp_path, target, packaging, changes):
    make_drafter(torch.bfloat16, **changes).save_pretrained(tmp_path / "own")
    drafter = DSparkDraftModel.from_pretrained(tmp_path / "own")
    export_checkpoint(drafter, tmp_path / "first", packaging, target)
    assert sorted(path.name for path in (tmp_path / "first").iterdir()) == list(FILES)
    loaded = DSparkDraftModel.from_pretrained(tmp_path / "first")
    assert loaded.dtype == torch.bfloat16
    for name in ("sample_from_anchor", "target_layer_ids", "draft_vocab_size", "sliding_window", "num_draft_tokens"):
        assert getattr(loaded.config, name) == getattr(drafter.config, name)
    assert_same(draft(loaded, target), draft(drafter, target))
    if packaging == "speculators" and loaded.config.draft_vocab_size is None and loaded.config.sample_from_anchor:
        assert loaded.config.num_target_layers is None  # which DeepSpec's form must say
        export_checkpoint(loaded, tmp_path / "deepspec", "deepspec", target)
        onward = DSparkDraftModel.from_pretrained(tmp_path / "deepspec")
        assert onward.config.num_target_layers == target.config.num_hidden_layers
    export_checkpoint(loaded, tmp_path / "again", packaging, target)
    for name in FILES:
        assert (tmp_path / "first" / name).read_bytes() == (tmp_path / "again" / name).read_bytes()


def test_deepspec_holds_what_it_must(tmp_path, target):
    export_checkpoint(make_drafter(), tmp_path / "d", "deepspec", target)
    config, tensors = content(tmp_path / "d")
    assert (config["architectures"], config["model_type"], config["dtype"]) == (["Qwen3DSparkModel"], "qwen3", "float32")
    assert (config["num_hidden_layers"], config["num_target_layers"], config["target_layer_ids"]) == (2, 4, [0, 2])
    assert HEADS | {"block_size", "mask_token_id", "num_anchors", "layer_types", "tie_word_embeddings"} <= config.keys()
    assert not {"sample_from_anchor", "auto_map", "dflash_config"} & config.keys()
    assert torch.equal(tensors["embed_tokens.weight"], target.model.embed_tokens.weight)
    assert torch.equal(tensors["lm_head.weight"], target.lm_head.weight)
    assert tensors.keys() - make_drafter().state_dict().keys() == {"embed_tokens.weight", "lm_head.weight"}


@pytest.mark.parametrize("reduced", [None, 20])
def test_speculators_holds_what_it_must(tmp_path, target, reduced):
    drafter = make_drafter(draft_vocab_size=reduced)
    export_checkpoint(drafter, tmp_path / "d", "speculators", target)
    config, tensors = content(tmp_path / "d")
    assert "model_type" not in config and config["speculators_model_type"] == "dspark"
    assert (config["aux_hidden_state_layer_ids"], config["draft_vocab_size"]) == ([1, 3], reduced or 61)
    settings = config["speculators_config"]
    assert settings["algorithm"] == "dspark" and settings["verifier"]["architectures"] == ["Qwen3ForCausalLM"]
    assert settings["proposal_methods"][0]["speculative_tokens"] == 4
    assert config["transformer_layer_config"]["model_type"] == "qwen3"
    assert HEADS | {"block_size", "mask_token_id", "sample_from_anchor", "target_hidden_size"} <= config.keys()
    extra = tensors.keys() - make_drafter().state_dict().keys()
    assert extra == ({"lm_head.weight", "d2t", "t2d"} if reduced else set())
    if reduced:
        assert torch.equal(tensors["lm_head.weight"], target.lm_head.weight[drafter.draft_token_ids])


def test_dflash_holds_what_it_must_and_needs_no_target(tmp_path):
    drafter = make_drafter(**PARALLEL)
    export_checkpoint(drafter, tmp_path / "d", "dflash")
    config, tensors = content(tmp_path / "d")
    assert (config["architectures"], config["block_size"], config["num_target_layers"]) == (["DFlashDraftModel"], 4, 4)
    assert config["dflash_config"] == {"mask_token_id": 60, "target_layer_ids": [0, 2]}
    assert tensors.keys() == drafter.state_dict().keys() and not HEADS & config.keys()


@pytest.mark.parametrize(
    ("packaging", "changes", "match"),
    [
        ("deepspec", dict(sample_from_anchor=False), "cannot express `sample_from_anchor` False"),
        ("deepspec", dict(draft_vocab_size=20), "cannot express `draft_vocab_size` 20"),
        ("dflash", {}, "cannot express `markov_rank` 6"),
        ("dflash", PARALLEL | dict(enable_confidence_head=True), "cannot express `enable_confidence_head` True"),
        ("dflash", PARALLEL | dict(sample_from_anchor=True), "cannot express `sample_from_anchor` True"),
        ("dflash", PARALLEL | dict(draft_vocab_size=20), "cannot express `draft_vocab_size` 20"),
        ("gguf", {}, "`packaging` must be one of deepspec, speculators, dflash, got 'gguf'"),
    ],
    ids=str,
)
def test_what_cannot_be_expressed_is_refused(tmp_path, target, packaging, changes, match):
    with pytest.raises(CheckpointError, match=match):
        export_checkpoint(make_drafter(**changes), tmp_path / "d", packaging, target)
    assert not (tmp_path / "d").exists()


def test_calibration_is_left_out_with_a_word(tmp_path, target, caplog):
    export_checkpoint(make_drafter(greedy_confidence_offsets=[0.5] * 4), tmp_path / "d", "speculators", target)
    assert "no place for calibration" in caplog.text
    assert not any("confidence_" in name and name.endswith(("offsets", "temperatures")) for name in content(tmp_path / "d")[0])


def test_targets_that_do_not_do(tmp_path, target):
    for packaging in ("deepspec", "speculators"):
        with pytest.raises(CheckpointError, match="pass the target"):
            export_checkpoint(make_drafter(), tmp_path / "d", packaging)
    with pytest.raises(ValueError, match="`num_target_layers` of the drafter is 5, the target's is 4"):
        export_checkpoint(make_drafter(num_target_layers=5), tmp_path / "d", "speculators", target)
    llama = tiny_target()
    with pytest.raises(CheckpointError, match="`model_type` of this target is 'llama'"):
        export_checkpoint(tiny_drafter(llama), tmp_path / "d", "deepspec", llama)
    assert not (tmp_path / "d").exists()
    export_checkpoint(tiny_drafter(llama), tmp_path / "d", "speculators", llama)
    with pytest.raises(CheckpointError, match="holds something already"):
        export_checkpoint(tiny_drafter(llama), tmp_path / "d", "speculators", llama)


# ---- the command line ----


@pytest.fixture(scope="module")
def folder(tmp_path_factory, target):
    """The target with a tokenizer, which the command line loads too, and a drafter for it."""
    path = tmp_path_factory.mktemp("models")
    target.save_pretrained(path / "target")
    tiny_tokenizer().save_pretrained(path / "target")
    make_drafter().save_pretrained(path / "own")
    return path


def invoke(*arguments, code: int = 0) -> str:
    result = CliRunner().invoke(cli.app, [str(argument) for argument in arguments])
    assert result.exit_code == code, (result.output, result.exception)
    return result.output


def test_convert(folder, tmp_path, target):
    for packaging in ("deepspec", "speculators"):
        output = tmp_path / packaging
        printed = invoke("convert", folder / "own", output, "--to", packaging, "--target", folder / "target")
        assert f"Drafter written to {output} as {packaging}." in printed
        assert_same(draft(DSparkDraftModel.from_pretrained(output), target), draft(make_drafter(), target))
    write_dflash(tmp_path / "source", make_drafter(**PARALLEL))
    invoke("convert", tmp_path / "source", tmp_path / "dflash", "--to", "dflash")
    assert DSparkDraftModel.from_pretrained(tmp_path / "dflash").config.num_draft_tokens == 3


def test_inspect(folder, tmp_path, target):
    source = write_speculators(tmp_path / "d", make_drafter(sample_from_anchor=False), target, sample_from_anchor=...)
    printed = invoke("inspect", source)
    assert "Packaging: speculators" in printed
    assert "sample_from_anchor = False: `speculative_tokens` is 3 for a `block_size` of 4" in printed
    assert "target_layer_ids = [0, 2]: `aux_hidden_state_layer_ids` [1, 3] minus one" in printed
    report = json.loads(invoke("inspect", source, "--target", folder / "target", "--json"))
    assert (report["packaging"], report["fits"], report["reason"], report["draft_tokens"]) == ("speculators", True, None, 3)
    assert report["config"]["target_layer_ids"] == [0, 2]
    assert report["parameters"] == sum(tensor.numel() for tensor in make_drafter(sample_from_anchor=False).parameters())


def test_inspect_a_pair_that_does_not_fit(folder, tmp_path):
    other = write_specforge(tmp_path / "d", make_drafter(num_target_layers=6))
    printed = invoke("inspect", other, "--target", folder / "target", code=1)
    assert "Fits" in printed and "no, this drafter does not belong to this target: `num_target_layers`" in printed


def test_failures_say_one_line(folder, tmp_path, monkeypatch, capsys):
    monkeypatch.delenv("HF_DSPARK_DEBUG", raising=False)
    for arguments, match in (
        (("inspect", tmp_path / "nowhere"), "is neither a folder here"),
        (("inspect", folder / "target"), "a language model, which is not read"),
        (("convert", folder / "own", tmp_path / "out", "--to", "deepspec"), "pass the target (`target=`, --target)"),
        (("convert", folder / "own", tmp_path / "out", "--to", "dflash"), "cannot express `markov_rank` 6"),
        (("convert", folder / "own", folder, "--to", "dflash"), "holds something already"),
    ):
        monkeypatch.setattr(sys, "argv", ["hf-dspark", *(str(argument) for argument in arguments)])
        with pytest.raises(SystemExit) as stop:
            cli.main()
        lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("hf-dspark: ")]
        assert stop.value.code == 1 and len(lines) == 1 and match in lines[0]
