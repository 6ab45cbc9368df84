"""Reading, checking and writing checkpoints: every packaging drafts alike, every contradiction has its own sentence.

The checkpoints are tiny, with random weights; those in a foreign packaging are built by `packagings`, not by the library.
Here are the library's own packaging and DeepSpec; the others have files of their own.
"""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from packagings import (
    BLOCK,
    GEMMA4,
    HIDDEN,
    VOCABULARY,
    assert_same,
    draft,
    edit_config,
    edit_tensors,
    file_names,
    make_config,
    make_drafter,
    make_target,
    write_deepspec,
)
from safetensors.torch import load_file, save_file
from transformers import AutoModel, AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM
from transformers.utils import hub as host_hub
from transformers.utils import logging

from hf_dspark import DSparkDraftModel, LoadProfile, formats
from hf_dspark.errors import CheckpointError
from hf_dspark.formats import checks, files, own, read_checkpoint, target_copies

SHARED = Path(os.environ.get("HF_DSPARK_SHARED", Path(__file__).parents[2] / "shared"))
GOLDEN = SHARED / "golden"
PROFILE = LoadProfile({1: 40.0, 4: 38.5, 8: 20.0}, draft_seconds=0.002)


@pytest.fixture(scope="module")
def target() -> Qwen3ForCausalLM:
    return make_target()


@pytest.fixture
def folder(tmp_path) -> Path:
    """A sound checkpoint in the library's own packaging."""
    make_drafter().save_pretrained(tmp_path / "own")
    return tmp_path / "own"


# ---- packagings ----


def test_golden_checkpoint_drafts_as_the_reference_did():
    if not (GOLDEN / "dspark_vanilla").is_dir():
        pytest.skip("needs the golden checkpoint: set HF_DSPARK_SHARED to the folder that holds golden/")
    golden_target = AutoModelForCausalLM.from_pretrained(GOLDEN / "target").eval()
    drafter = DSparkDraftModel.from_pretrained(GOLDEN / "dspark_vanilla")
    config = drafter.config
    assert (config.block_size, config.sample_from_anchor, config.target_layer_ids) == (7, True, [0, 2, 4])
    assert (config.markov_rank, config.mask_token_id, config.pad_token_id, config.eos_token_id) == (16, 130, 0, 2)
    case = json.loads((GOLDEN / "dspark_vanilla" / "reference.json").read_text())["cases"][0]
    expected = load_file(GOLDEN / "dspark_vanilla" / "reference_tensors.safetensors")
    first = case["rounds"][0]
    tokens = [first["anchor"], *first["tokens"][:-1]]
    hidden, base, bias, confidence = draft(drafter, golden_target, case["prompt"], tokens)
    found = {"hidden": hidden, "base": base, "logits": base + bias, "conf": confidence}
    for name, tensor in found.items():
        torch.testing.assert_close(tensor[0], expected[f"case0.round0.{name}"], rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    "changes",
    [
        dict(markov_head_type="vanilla"),
        dict(markov_head_type="gated"),
        dict(markov_head_type="rnn"),
        dict(confidence_head_with_markov=False),
        dict(enable_confidence_head=False),
        dict(markov_rank=0, enable_confidence_head=False),
    ],
    ids=lambda changes: ",".join(f"{name}={value}" for name, value in changes.items()),
)
def test_deepspec_and_own_packaging_draft_alike(tmp_path, target, changes):
    drafter = make_drafter(**changes)
    drafter.save_pretrained(tmp_path / "own")
    write_deepspec(tmp_path / "deepspec", drafter, target)
    own, deepspec = (DSparkDraftModel.from_pretrained(tmp_path / name) for name in ("own", "deepspec"))
    assert own.config.to_json_string() == deepspec.config.to_json_string()
    outputs = draft(deepspec, target)
    assert_same(outputs, draft(own, target))
    assert_same(outputs, draft(drafter, target))


def test_deepspec_dflash_is_anchor_first_without_heads(tmp_path, target):
    drafter = make_drafter(markov_rank=0, enable_confidence_head=False)
    names = ("markov_rank", "markov_head_type", "enable_confidence_head", "confidence_head_with_markov")
    write_deepspec(tmp_path / "dflash", drafter, target, architectures=["Qwen3DFlashModel"])
    edit_config(tmp_path / "dflash", **dict.fromkeys(names, ...))
    loaded = DSparkDraftModel.from_pretrained(tmp_path / "dflash")
    assert loaded.config.sample_from_anchor and loaded.config.num_draft_tokens == BLOCK
    assert_same(draft(loaded, target), draft(drafter, target))


def test_deepspec_ignores_what_describes_the_target(tmp_path, target):
    write_deepspec(tmp_path / "d", make_drafter(), target, model_type="qwen3", num_anchors="many", sliding_window=4096, foo=[1])
    config, tensors, notes = read_checkpoint(tmp_path / "d")
    assert config.sliding_window is None and config.model_type == "hf_dspark" and notes == []
    assert not any(name.startswith(("embed_tokens", "lm_head")) for name in tensors)


def test_deepspec_rope_of_transformers_4(tmp_path, target):
    write_deepspec(tmp_path / "d", make_drafter(), target)
    edit_config(tmp_path / "d", rope_parameters=..., rope_theta=12345.0, rope_scaling={"type": "linear", "factor": 2.0})
    rope = DSparkDraftModel.from_pretrained(tmp_path / "d").config.rope_parameters
    assert rope == {"rope_type": "linear", "factor": 2.0, "rope_theta": 12345.0}


def test_deepspec_sliding_layers(tmp_path, target):
    write_deepspec(tmp_path / "d", make_drafter(), target, layer_types=["sliding_attention"] * 2, sliding_window=16)
    assert DSparkDraftModel.from_pretrained(tmp_path / "d").config.sliding_window == 16
    edit_config(tmp_path / "d", layer_types=["sliding_attention", "full_attention"])
    with pytest.raises(CheckpointError, match="must be all full_attention, or all sliding_attention"):
        DSparkDraftModel.from_pretrained(tmp_path / "d")


@pytest.mark.parametrize(
    ("content", "match"),
    [
        (dict(architectures=["Gemma4ForCausalLM"], model_type="gemma4_text"), "a language model, which is not read"),
        (dict(architectures=["Gemma4Eagle3Model"], model_type="gemma4_text"), "an EAGLE-3 drafter"),
        (dict(architectures=["Qwen3Eagle3Model"], model_type="qwen3"), "an EAGLE-3 drafter"),
        (dict(model_type="deepseek_v4", dspark_block_size=5), "inside of a DeepSeek-V4 checkpoint"),
        (dict(model_type="lfm2"), "an LFM2 drafter"),
        (dict(model_type="qwen3_5", confidence_temperatures=[1.0]), "an Ornith or Qwen3.5 drafter"),
        (dict(architectures=["NemotronDSparkModel"]), "a Nemotron drafter"),
        (dict(architectures=["Qwen3ForCausalLM"], model_type="qwen3"), "a language model, which is not read"),
        (dict(architectures=["Surprise"], model_type="new"), r"of no known drafter \(architectures \['Surprise'\]"),
        (dict(architectures=5), "of no known drafter"),
    ],
)
def test_other_packagings_are_refused_by_name(folder, content, match):
    (folder / "config.json").write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match=match):
        DSparkDraftModel.from_pretrained(folder)


def test_packagings_that_only_their_tensors_give_away(folder):
    (folder / "config.json").write_text('{"model_type": "qwen3"}')
    save_file({"markov_w1": torch.ones(2)}, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match="a Model-Optimizer export"):
        DSparkDraftModel.from_pretrained(folder)
    save_file({"mtp.0.fc.weight": torch.ones(2)}, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match="DeepSeek-V4"):
        DSparkDraftModel.from_pretrained(folder)
    (folder / "config.json").unlink()
    (folder / "drafter-q4.gguf").touch()
    with pytest.raises(CheckpointError, match=r"drafter-q4\.gguf is a GGUF file"):
        DSparkDraftModel.from_pretrained(folder)


# ---- loading ----


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
def test_dtype(tmp_path, stored):
    make_drafter(stored).save_pretrained(tmp_path)
    edit_config(tmp_path, dtype="float16")  # only the weights know
    for loaded in (DSparkDraftModel, AutoModel):
        assert loaded.from_pretrained(tmp_path).dtype == stored
        assert loaded.from_pretrained(tmp_path, dtype="auto").dtype == stored
        assert loaded.from_pretrained(tmp_path, dtype=torch.float64).dtype == torch.float64
    edit_tensors(tmp_path, norm__weight=lambda norm: norm.double())
    assert DSparkDraftModel.from_pretrained(tmp_path).dtype == torch.float64  # the narrowest that loses nothing


def test_push_to_hub_of_other_weights_is_refused(tmp_path):
    drafter = make_drafter()
    for options in ({"variant": "fp16"}, {"state_dict": drafter.state_dict()}):
        with pytest.raises(ValueError, match="uploads the drafter's own weights"):
            drafter.save_pretrained(tmp_path / "drafter", push_to_hub=True, **options)
    assert not (tmp_path / "drafter").exists()


def test_options_of_the_host(folder):
    drafter = DSparkDraftModel.from_pretrained(folder, attn_implementation="eager", device_map={"": "cpu"})
    assert drafter.config._attn_implementation == "eager" and drafter.device.type == "cpu"
    assert not drafter.training and drafter.name_or_path == str(folder)
    _, info = DSparkDraftModel.from_pretrained(folder, output_loading_info=True)
    assert not any(info.values())
    assert DSparkDraftModel.from_pretrained(folder.parent, subfolder="own").config.block_size == BLOCK
    state_dict = drafter.state_dict()
    again = DSparkDraftModel.from_pretrained(None, config=drafter.config, state_dict=dict(state_dict))
    assert all(torch.equal(tensor, state_dict[name]) for name, tensor in again.state_dict().items())
    with pytest.raises(CheckpointError, match="asks for a pickle"):
        DSparkDraftModel.from_pretrained(folder, use_safetensors=False)
    with pytest.raises(CheckpointError, match="has no folder 'elsewhere'"):
        DSparkDraftModel.from_pretrained(folder, subfolder="elsewhere")


def test_configuration_given_or_changed(folder):
    config = make_config(sliding_window=8)
    assert DSparkDraftModel.from_pretrained(folder, config=config).config.sliding_window == 8
    assert config.dtype is None  # the caller's object is left alone
    assert DSparkDraftModel.from_pretrained(folder, config=folder).config.sliding_window is None
    for loaded in (DSparkDraftModel, AutoModel):
        assert loaded.from_pretrained(folder, block_size=3).config.num_draft_tokens == 3
        with pytest.raises(CheckpointError, match=r"`block_size` 9 was asked for, but the drafter was trained with 4"):
            loaded.from_pretrained(folder, block_size=9)
    calibrated = DSparkDraftModel.from_pretrained(folder)
    calibrated.config.confidence_temperatures, calibrated.config.confidence_offsets = [1.0, 2.0, 3.0, 4.0], [0.1] * 4
    calibrated.save_pretrained(folder)
    shorter = DSparkDraftModel.from_pretrained(folder, block_size=2).config
    assert (shorter.confidence_temperatures, shorter.confidence_offsets) == ([1.0, 2.0], [0.1, 0.1])
    assert AutoModel.from_pretrained(folder, block_size=2).config.confidence_temperatures == [1.0, 2.0]
    for loaded in (DSparkDraftModel, AutoModel):
        with pytest.raises(CheckpointError, match=r"describes no drafter: .*`mask_token_id`"):
            loaded.from_pretrained(folder, mask_token_id=config.eos_token_id)
    with pytest.raises(CheckpointError, match="must be a DSparkConfig, got a Qwen3Config"):
        DSparkDraftModel.from_pretrained(folder, config=Qwen3Config())
    with pytest.raises(CheckpointError, match=r"`markov_head_type` 'gated', but the weights lack"):
        DSparkDraftModel.from_pretrained(folder, markov_head_type="gated")


def test_loading_and_saving_are_quiet(folder, tmp_path, capfd):
    before = logging.is_progress_bar_enabled()
    logging.enable_progress_bar()
    try:
        AutoModel.from_pretrained(folder).save_pretrained(tmp_path / "again")
        assert logging.is_progress_bar_enabled()  # left as it was found
    finally:
        (logging.enable_progress_bar if before else logging.disable_progress_bar)()
    assert capfd.readouterr() == ("", "")


def test_fields_of_a_later_version_are_reported(folder, monkeypatch):
    edit_config(folder, next_idea=3, use_cache=False, auto_map={"AutoModel": "x.Y"})
    _, _, notes = read_checkpoint(folder)
    assert len(notes) == 1 and "next_idea" in notes[0] and "use_cache" not in notes[0]


def test_hub_cache(folder, tmp_path):
    """A repository as the Hub's client keeps it, read without a connection."""
    cached = tmp_path / "cache" / "models--someone--drafter"
    shutil.copytree(folder, cached / "snapshots" / ("0" * 40))
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text("0" * 40)
    drafter = DSparkDraftModel.from_pretrained("someone/drafter", cache_dir=tmp_path / "cache", local_files_only=True)
    assert drafter.name_or_path == "someone/drafter" and drafter.config.block_size == BLOCK


def test_hub_download_comes_in_two_steps(folder, monkeypatch):
    """What is refused by its configuration costs no download of weights, and both parts are of one commit."""
    commit = folder.rename(folder.parent / "0123abcd")
    calls = []

    def snapshot_download(repo_id, allow_patterns, tqdm_class, **kwargs):
        calls.append((repo_id, allow_patterns, kwargs))
        return str(commit)

    monkeypatch.setattr(files, "snapshot_download", snapshot_download)
    DSparkDraftModel.from_pretrained("someone/drafter", revision="v1", token="secret", force_download=True)
    options = {"token": "secret", "force_download": True}
    assert calls == [
        ("someone/drafter", ["*.json", "*.md"], {"revision": "v1", **options}),
        ("someone/drafter", ["model*.safetensors"], {"revision": "0123abcd", **options}),
    ]
    calls.clear()
    edit_config(commit, model_type="qwen3", architectures=["Qwen3ForCausalLM"])
    with pytest.raises(CheckpointError, match="a language model"):
        DSparkDraftModel.from_pretrained("someone/drafter")
    assert len(calls) == 1


def test_no_folder_and_no_repository(folder):
    with pytest.raises(CheckpointError, match="is neither a folder here nor the id of a repository"):
        DSparkDraftModel.from_pretrained(folder / "not" / "here")
    with pytest.raises(CheckpointError, match="is a file; a drafter is a folder"):
        DSparkDraftModel.from_pretrained(folder / "config.json")


# ---- saving ----


@pytest.mark.parametrize("changes", [{}, {"draft_vocab_size": 20}, {"markov_rank": 0, "sample_from_anchor": False}])
def test_write_read_write_gives_the_same_bytes(tmp_path, changes):
    first = make_drafter(torch.bfloat16, **changes)
    first.load_profile = PROFILE
    first.save_pretrained(tmp_path / "first")
    for number, loaded in enumerate((DSparkDraftModel, AutoModel)):
        drafter = loaded.from_pretrained(tmp_path / "first")
        assert type(drafter) is DSparkDraftModel and drafter.load_profile == PROFILE
        drafter.save_pretrained(tmp_path / f"again{number}")
        names = file_names(tmp_path / "first")
        assert names == file_names(tmp_path / f"again{number}")
        assert names == sorted([*own.CODE_FILES, "config.json", "load_profile.json", "model.safetensors"])
        for name in names:
            assert (tmp_path / "first" / name).read_bytes() == (tmp_path / f"again{number}" / name).read_bytes()


def test_bound_drafter_saves_nothing_of_the_target(tmp_path, target):
    write_deepspec(tmp_path / "deepspec", make_drafter(), target)
    drafter = DSparkDraftModel.from_pretrained(tmp_path / "deepspec")
    drafter.bind(target)
    drafter.save_pretrained(tmp_path / "own")
    make_drafter().save_pretrained(tmp_path / "expected")
    for name in ("config.json", "model.safetensors"):
        assert (tmp_path / "own" / name).read_bytes() == (tmp_path / "expected" / name).read_bytes()


def test_shards_and_what_an_earlier_save_left(folder, target):
    drafter = DSparkDraftModel.from_pretrained(folder)
    drafter.load_profile = PROFILE
    (folder / "notes.txt").write_text("mine")
    drafter.save_pretrained(folder, max_shard_size="8KB")  # over the file that the drafter's tensors are mapped from
    shards = sorted(path.name for path in folder.glob("*.safetensors"))
    assert len(shards) > 2 and "model.safetensors" not in shards and (folder / "load_profile.json").is_file()
    outputs = draft(drafter, target)
    again = DSparkDraftModel.from_pretrained(folder)
    assert again.load_profile == PROFILE
    assert_same(draft(again, target), outputs)

    again.load_profile = None
    again.save_pretrained(folder)
    assert file_names(folder) == sorted([*own.CODE_FILES, "config.json", "model.safetensors", "notes.txt"])
    assert_same(draft(DSparkDraftModel.from_pretrained(folder), target), outputs)


def test_variant(folder):
    drafter = make_drafter()
    drafter.half().save_pretrained(folder, variant="fp16")
    assert {"model.safetensors", "model.fp16.safetensors"} <= set(os.listdir(folder))
    assert DSparkDraftModel.from_pretrained(folder).dtype == torch.float32
    assert DSparkDraftModel.from_pretrained(folder, variant="fp16").dtype == torch.float16


def test_a_crash_while_saving_leaves_the_old_checkpoint(folder, monkeypatch):
    before = {name: (folder / name).read_bytes() for name in file_names(folder)}
    drafter = DSparkDraftModel.from_pretrained(folder)
    drafter.config.rms_norm_eps = 1e-5

    def crash(tensors, filename, metadata=None):
        Path(filename).write_bytes(b"half a file")
        raise OSError("no space left on device")

    monkeypatch.setattr("transformers.modeling_utils.safe_save_file", crash)
    with pytest.raises(OSError, match="no space left"):
        drafter.save_pretrained(folder)
    assert {name: (folder / name).read_bytes() for name in file_names(folder)} == before


def test_only_the_main_process_writes(tmp_path):
    make_drafter().save_pretrained(tmp_path / "other", is_main_process=False)
    assert os.listdir(tmp_path / "other") == []


def test_push_to_hub(tmp_path, monkeypatch):
    """The host uploads, of what it is given, everything that was saved."""

    class Repository:
        repo_id = "someone/drafter"

    class Api:
        def create_repo(self, repo_id, **kwargs):
            seen["created"] = repo_id, kwargs.get("token")
            return Repository()

        def create_commit(self, repo_id, operations, **kwargs):
            seen["uploaded"] = sorted(operation.path_in_repo for operation in operations)
            seen["message"] = kwargs["commit_message"]

    class Card:
        def save(self, path):
            Path(path).write_text("card")

    seen = {}
    monkeypatch.setattr(host_hub, "hf_api", Api)
    monkeypatch.setattr(host_hub, "create_and_tag_model_card", lambda *args, **kwargs: Card())
    drafter = make_drafter()
    drafter.load_profile = PROFILE
    drafter.save_pretrained(tmp_path / "drafter", push_to_hub=True, token="secret", commit_message="better")
    assert seen == {
        "created": ("drafter", "secret"),
        "uploaded": sorted(["README.md", *own.CODE_FILES, "config.json", "load_profile.json", "model.safetensors"]),
        "message": "better",
    }
    assert "README.md" not in file_names(tmp_path / "drafter")  # transformers' own, of the upload alone


# ---- refusals ----


def test_untrained_norms_are_refused(tmp_path):
    DSparkDraftModel(make_config()).save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match="every RMSNorm weight is exactly one"):
        DSparkDraftModel.from_pretrained(tmp_path)
    edit_tensors(tmp_path, norm__weight=lambda norm: norm * 1.5)  # one that moved is enough
    DSparkDraftModel.from_pretrained(tmp_path)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "model.pth", "last.ckpt"])
def test_pickles_are_refused(folder, name):
    (folder / "model.safetensors").unlink()

    class Bomb:
        def __reduce__(self):
            return os.mkdir, (str(folder / "executed"),)

    torch.save({"fc.weight": Bomb()}, folder / name)
    with pytest.raises(CheckpointError, match=rf"the weights are in a pickle \({name}\)"):
        DSparkDraftModel.from_pretrained(folder)
    assert not (folder / "executed").exists()


def test_missing_and_damaged_weights_are_refused(folder):
    weights = folder / "model.safetensors"
    sound = weights.read_bytes()
    for content in (sound[:-1], sound[:100], sound[:4], b"", b"\xff" * 8 + sound[8:], sound[:8] + b"}" + sound[9:]):
        weights.write_bytes(content)
        with pytest.raises(CheckpointError, match=r"model\.safetensors is not a complete safetensors file"):
            DSparkDraftModel.from_pretrained(folder)
    weights.unlink()
    with pytest.raises(CheckpointError, match="no weights: neither"):
        DSparkDraftModel.from_pretrained(folder)


def test_no_data_is_read_before_the_header_fits(folder, monkeypatch):
    """Neither what a header claims nor what a configuration claims is ever allocated."""
    monkeypatch.setattr(formats, "read_tensors", lambda *args: pytest.fail("data was read"))
    edit_config(folder, intermediate_size=2**40)
    with pytest.raises(CheckpointError, match=r"must have shape \[1099511627776, 32\]"):
        DSparkDraftModel.from_pretrained(folder)
    edit_config(folder, intermediate_size=48)
    edit_tensors(folder, fc__weight=lambda weight: torch.zeros(2**20))
    with pytest.raises(CheckpointError, match=r"`fc.weight` must have .* got \[1048576\]"):
        DSparkDraftModel.from_pretrained(folder)
    header = json.dumps({"fc.weight": {"dtype": "F32", "shape": [2**40], "data_offsets": [0, 2**42]}}).encode()
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(CheckpointError, match="not a complete safetensors file"):
        DSparkDraftModel.from_pretrained(folder)


def test_shards_are_refused(folder):
    drafter = DSparkDraftModel.from_pretrained(folder)
    drafter.save_pretrained(folder, max_shard_size="8KB")
    index = folder / "model.safetensors.index.json"
    sound = json.loads(index.read_text())
    shards = list(sound["weight_map"].values())
    shard = max(shards, key=shards.count)
    name = next(name for name, file in sound["weight_map"].items() if file == shard)  # one of several in there

    def refused(match: str, **weight_map):
        index.write_text(json.dumps({"weight_map": sound["weight_map"] | weight_map}))
        with pytest.raises(CheckpointError, match=match):
            DSparkDraftModel.from_pretrained(folder)

    shutil.copy(folder / shard, folder.parent / "outside.safetensors")
    for outside in ("../outside.safetensors", str(folder.parent / "outside.safetensors"), "..\\x.safetensors", "x.bin"):
        refused("which is no .safetensors file of the same folder", **{name: outside})
    refused("names the shard model-9.safetensors, which is missing", **{name: "model-9.safetensors"})
    refused("places `ghost` in a shard that does not hold it", ghost=shard)
    other = next(file for file in sound["weight_map"].values() if file != shard)
    refused(f"{shard} holds `{name}`, which .* places elsewhere", **{name: other})
    refused("`weight_map` must map tensors to file names", **{name: 3})
    index.write_text(json.dumps(sound))
    save_file(drafter.state_dict(), folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"model\.safetensors and .* both hold weights"):
        DSparkDraftModel.from_pretrained(folder)
    (folder / "model.safetensors").unlink()
    (folder / shard).unlink()
    refused(f"names the shard {shard}, which is missing")


def test_expected_shapes_are_those_of_the_model():
    for changes in (
        {},
        dict(markov_head_type="gated", attention_bias=True),
        dict(markov_head_type="rnn", draft_vocab_size=20, target_hidden_size=48),
        dict(markov_rank=0, num_key_value_heads=4),
        dict(enable_confidence_head=False, target_layer_ids=[-1, 0, 1]),
        dict(confidence_head_with_markov=False),
        GEMMA4,
        GEMMA4 | dict(attention_k_eq_v=False),
    ):
        drafter = DSparkDraftModel(make_config(**changes))
        found = {name: tuple(tensor.shape) for name, tensor in drafter.state_dict().items()}
        assert checks.expected_shapes(drafter.config) == found


# ---- the target's tensors in a drafter's file ----


def other_target(target: Qwen3ForCausalLM, module: str, row: int) -> Qwen3ForCausalLM:
    other = Qwen3ForCausalLM(target.config).eval()
    other.load_state_dict(target.state_dict())
    with torch.no_grad():
        other.get_submodule(module).weight[row, -1] += 1e-3
    return other


@pytest.mark.parametrize(("module", "name"), [("model.embed_tokens", "embed_tokens"), ("lm_head", "lm_head")])
@pytest.mark.parametrize("row", [0, VOCABULARY - 1])
def test_another_target_is_refused(tmp_path, target, module, name, row, monkeypatch):
    monkeypatch.setattr(target_copies, "_PIECE", 10 * HIDDEN)  # seven pieces, the last one shorter
    write_deepspec(tmp_path / "d", make_drafter(), target)
    drafter = DSparkDraftModel.from_pretrained(tmp_path / "d")
    other = other_target(target, module, row)
    with pytest.raises(CheckpointError, match=rf"trained for another target: `{name}.weight`"):
        drafter.bind(other)
    with pytest.raises(RuntimeError, match="not bound"):
        drafter.embed(torch.tensor([[1]]))
    drafter.bind(target)
    with pytest.raises(CheckpointError, match="another target"):
        drafter.bind(other)
    assert drafter.bound_target.model() is target


def test_copies_are_compared_once(tmp_path, target, monkeypatch):
    write_deepspec(tmp_path / "d", make_drafter(), target)
    drafter = DSparkDraftModel.from_pretrained(tmp_path / "d")
    opened = []
    monkeypatch.setattr(target_copies, "opened", lambda file: opened.append(file) or files.opened(file))
    drafter.bind(target)
    drafter.bind(target)
    assert opened == [tmp_path / "d" / "model.safetensors"] * 2  # embedding and head


def test_rows_of_the_head_follow_the_target():
    """A reduced vocabulary has a copy of them, which nothing else would move or cast."""
    target, drafter = make_target(), make_drafter(draft_vocab_size=20)
    drafter.set_draft_vocabulary(torch.arange(10, 30))
    drafter.bind(target)
    bound = drafter.bound_target
    drafter.bind(target)
    assert drafter.bound_target is bound
    target.to(torch.bfloat16)
    drafter.bind(target)
    hidden = torch.randn(3, HIDDEN)
    expected = hidden.bfloat16() @ target.get_output_embeddings().weight[10:30].T
    assert torch.equal(drafter.base_logits(hidden), expected.float())
    assert not torch.equal(bound.base_logits(hidden), expected.float())


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("loaded", [torch.float32, torch.bfloat16])
def test_a_target_in_another_dtype_is_the_same_target(tmp_path, stored, loaded):
    """Files hold what the target was trained in, and users load it in what their machine likes."""
    torch.manual_seed(2)
    original = Qwen3ForCausalLM(Qwen3Config(vocab_size=61, hidden_size=32, intermediate_size=8, num_hidden_layers=4))
    original = original.to(stored)
    drafter = make_drafter(stored)
    write_deepspec(tmp_path / "d", drafter, original, **{name: getattr(drafter.config, name) for name in SHAPE_FIELDS})
    DSparkDraftModel.from_pretrained(tmp_path / "d").bind(original.to(loaded))


SHAPE_FIELDS = ("num_attention_heads", "num_key_value_heads", "head_dim", "max_position_embeddings")


def test_copies_of_another_shape_or_gone(tmp_path, target):
    write_deepspec(tmp_path / "d", make_drafter(), target)
    drafter = DSparkDraftModel.from_pretrained(tmp_path / "d")
    edit_tensors(tmp_path / "d", lm_head__weight=lambda t: t[1:])
    with pytest.raises(CheckpointError, match=r"`lm_head.weight` must have shape \[61, 32\]"):
        DSparkDraftModel.from_pretrained(tmp_path / "d")
    (tmp_path / "d" / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="has changed since it was first read"):
        drafter.bind(target)
    with pytest.raises(RuntimeError, match="not bound"):
        drafter.embed(torch.tensor([[1]]))
