"""Foreign packagings: each drafts as the library's own does, and every contradiction is refused by the field's name."""

import json
from pathlib import Path

import pytest
import torch
from packagings import (
    MASK,
    PARALLEL,
    assert_same,
    build,
    draft,
    edit_config,
    make_drafter,
    make_target,
    write_dflash,
    write_modelopt,
    write_specforge,
    write_speculators,
)
from tiny import one_thread  # noqa: F401
from transformers import Qwen3ForCausalLM
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.muse_glimmer_assistant.configuration_muse_glimmer_assistant import MuseGlimmerAssistantConfig
from transformers.models.muse_glimmer_assistant.modeling_muse_glimmer_assistant import MuseGlimmerAssistantModel

from hf_dspark import DSparkConfig, DSparkDraftModel
from hf_dspark.errors import CheckpointError
from hf_dspark.formats import read_checkpoint
from hf_dspark.formats.export import export_checkpoint


@pytest.fixture(scope="module")
def target() -> Qwen3ForCausalLM:
    return make_target()


def drafts_as(folder: Path, drafter: DSparkDraftModel, target: Qwen3ForCausalLM) -> DSparkConfig:
    """Compares a checkpoint with the drafter it was made from: logits of a block, then texts and what was accepted."""
    loaded = DSparkDraftModel.from_pretrained(folder)
    assert_same(draft(loaded, target), draft(drafter, target))
    texts, accepted = [], []
    for model in (loaded, drafter):
        texts.append(target.generate(torch.tensor([[5, 9, 11, 3]]), assistant_model=model, max_new_tokens=8, do_sample=False))
        accepted.append((model.statistics.accepted, model.statistics.drafted))
    assert torch.equal(*texts) and accepted[0] == accepted[1]
    assert loaded.config.sliding_window == drafter.config.sliding_window  # these texts are too short to show it
    return loaded.config


@pytest.mark.parametrize(
    "changes",
    [
        {},
        dict(sample_from_anchor=False),
        dict(draft_vocab_size=20),
        dict(draft_vocab_size=20, sample_from_anchor=False, markov_head_type="gated"),
        dict(target_layer_ids=[-1, 1], markov_head_type="rnn"),
        dict(sliding_window=5),
        PARALLEL,
    ],
    ids=lambda changes: ",".join(f"{name}={value}" for name, value in changes.items()),
)
def test_speculators_drafts_alike(tmp_path, target, changes):
    drafter = make_drafter(**changes)
    config = drafts_as(write_speculators(tmp_path / "d", drafter, target), drafter, target)
    ours = drafter.config
    for name in ("target_layer_ids", "sample_from_anchor", "draft_vocab_size", "sliding_window", "num_draft_tokens"):
        assert getattr(config, name) == getattr(ours, name)
    assert config.num_target_layers is None


def test_speculators_ids_are_not_taken_as_ours(tmp_path, target):
    """Read without the shift, the same file drafts something else: the comparison above can fail."""
    drafter = make_drafter()
    write_speculators(tmp_path / "d", drafter, target, aux_hidden_state_layer_ids=drafter.config.target_layer_ids)
    loaded = DSparkDraftModel.from_pretrained(tmp_path / "d")
    assert loaded.config.target_layer_ids == [-1, 1]
    with pytest.raises(AssertionError, match="not close"):
        assert_same(draft(loaded, target), draft(drafter, target))


@pytest.mark.parametrize(
    ("said", "promised", "anchor", "warned"),
    [
        (..., 4, True, False),
        (..., 3, False, False),
        (..., None, False, True),
        (True, None, True, False),
        (True, 2, True, False),  # fewer than it can
        (False, 3, False, False),
    ],
)
def test_speculators_anchor(tmp_path, target, said, promised, anchor, warned):
    settings = {"algorithm": "dspark", "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": promised}]}
    folder = write_speculators(tmp_path / "d", make_drafter(), target, sample_from_anchor=said, speculators_config=settings)
    config, _, notes = read_checkpoint(folder)
    assert config.sample_from_anchor is anchor
    assert any("`sample_from_anchor`" in note for note in notes) is warned


@pytest.mark.parametrize("changes", [{}, dict(markov_head_type="rnn"), dict(confidence_head_with_markov=False)])
def test_specforge_drafts_alike(tmp_path, target, changes):
    drafter = make_drafter(**changes)
    assert drafts_as(write_specforge(tmp_path / "d", drafter), drafter, target).num_target_layers == 4


def test_specforge_with_heads_at_the_top_level(tmp_path, target):
    drafter, names = (
        make_drafter(),
        ("markov_rank", "markov_head_type", "enable_confidence_head", "confidence_head_with_markov"),
    )
    top = {name: getattr(drafter.config, name) for name in names}
    folder = write_specforge(tmp_path / "d", drafter, nested=dict.fromkeys(("projector_type", *names), ...), **top)
    assert json.loads((folder / "config.json").read_text())["dflash_config"].keys().isdisjoint(names)
    drafts_as(folder, drafter, target)


@pytest.mark.parametrize(
    ("kind", "more"), [("yarn", {}), ("llama3", {"low_freq_factor": 1.0, "high_freq_factor": 4.0})], ids=["yarn", "llama3"]
)
def test_specforge_keeps_its_own_rope(tmp_path, target, kind, more):
    scaling = {"factor": 4.0, "original_max_position_embeddings": 32, **more}
    drafter = make_drafter(rope_parameters={"rope_type": kind, "rope_theta": 5e5, **scaling})
    folder = write_specforge(tmp_path / "d", drafter, rope_scaling={"type": kind, **scaling})
    config = drafts_as(folder, drafter, target)
    assert config.rope_parameters["rope_type"] == kind and config.rope_parameters["rope_theta"] == 5e5
    expected, _ = ROPE_INIT_FUNCTIONS[kind](config, "cpu")
    assert torch.equal(DSparkDraftModel.from_pretrained(folder).rotary_emb.inv_freq, expected)


@pytest.mark.parametrize("changes", [{}, dict(sample_from_anchor=False)])
def test_modelopt_drafts_alike(tmp_path, target, changes):
    drafter = make_drafter(**changes)
    assert drafts_as(write_modelopt(tmp_path / "d", drafter), drafter, target).sample_from_anchor is not bool(changes)


@pytest.mark.parametrize("changes", [{}, dict(sliding_window=5)])
def test_dflash_drafts_alike(tmp_path, target, changes):
    drafter = make_drafter(**PARALLEL | changes)
    config = drafts_as(write_dflash(tmp_path / "d", drafter), drafter, target)
    assert config.num_draft_tokens == drafter.config.block_size - 1


def test_muse_glimmer_assistant_runs_as_in_transformers(tmp_path):
    """Its own implementation is there to be compared with, and its own writer has made the file."""
    torch.manual_seed(0)
    config = MuseGlimmerAssistantConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
        max_position_embeddings=128, sliding_window=16, block_size=4, mask_token_id=MASK, target_layer_ids=[0, 2],
        pad_token_id=0, bos_token_id=1, eos_token_id=2, attn_implementation="eager",
    )  # fmt: skip
    theirs = MuseGlimmerAssistantModel(config).eval()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    theirs.save_pretrained(tmp_path)
    ours = DSparkDraftModel.from_pretrained(tmp_path, attn_implementation="eager")
    assert (ours.config.sliding_window, ours.config.sample_from_anchor, ours.config.vocab_size) == (16, False, None)
    noise, context = torch.randn(2, 4, 32), torch.randn(2, 6, 64)
    positions = torch.arange(10)[None].expand(2, -1)
    with torch.no_grad():
        expected = theirs(noise_embeds=noise, context_hidden_states=context, position_ids=positions).last_hidden_state
        found = ours(noise, ours.project_context(context), positions).last_hidden_state
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    target, prompt = make_target(), torch.tensor([[5, 9, 11, 3]])
    plain = target.generate(prompt, max_new_tokens=8, do_sample=False)
    known = DSparkDraftModel.from_pretrained(tmp_path, vocab_size=target.config.vocab_size)
    assert torch.equal(target.generate(prompt, assistant_model=known, max_new_tokens=8, do_sample=False), plain)
    assert known.statistics.drafted > 0
    assert "`vocab_size` is not written" in read_checkpoint(tmp_path)[2][0]
    with pytest.raises(CheckpointError, match="do not say its target's `vocab_size`: pass the target"):
        export_checkpoint(ours, tmp_path / "without", "dflash")
    for packaging in ("dflash", "speculators"):
        export_checkpoint(ours, tmp_path / packaging, packaging, target)
        assert DSparkDraftModel.from_pretrained(tmp_path / packaging).config.vocab_size == target.config.vocab_size
    ours = DSparkDraftModel.from_pretrained(tmp_path)
    ours.save_pretrained(tmp_path / "own")
    DSparkDraftModel.from_pretrained(tmp_path / "own").save_pretrained(tmp_path / "again")  # unknown sizes and all
    for name in ("config.json", "model.safetensors"):
        assert (tmp_path / "own" / name).read_bytes() == (tmp_path / "again" / name).read_bytes()


def test_pairs_that_only_binding_can_refuse(tmp_path, target):
    """Where a packaging does not say how many layers the target has, the target does."""
    write_speculators(tmp_path / "d", make_drafter(), target, aux_hidden_state_layer_ids=[1, 4])
    drafter = DSparkDraftModel.from_pretrained(tmp_path / "d")
    with pytest.raises(ValueError, match=r"`target_layer_ids` \[0, 3\] must lie below 3"):
        drafter.bind(target)
    write_speculators(tmp_path / "r", make_drafter(draft_vocab_size=20), target)
    reduced = DSparkDraftModel.from_pretrained(tmp_path / "r")
    reduced.bind(target)
    for row, fits in ((1, True), (3, False)):  # of the two only token 3 is in the draft vocabulary
        other = make_target()
        with torch.no_grad():
            other.lm_head.weight[row, 0] += 1e-3
        if fits:
            reduced.bind(other)
        else:
            with pytest.raises(CheckpointError, match=r"another target: `lm_head.weight`"):
                reduced.bind(other)


@pytest.mark.parametrize("non_causal", [False, None, "yes"])
def test_a_causal_window_is_refused(tmp_path, non_causal):
    folder = build("speculators", tmp_path / "d", sliding_window=5)
    edit_config(folder, sliding_window_non_causal=non_causal)
    with pytest.raises(CheckpointError, match="`sliding_window_non_causal` must be true for sliding layers"):
        DSparkDraftModel.from_pretrained(folder)
