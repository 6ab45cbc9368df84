"""Foreign packagings: each drafts as the library's own does, and every contradiction is refused by the field's name."""

import json
from pathlib import Path

import pytest
import torch
from packagings import (
    MASK,
    assert_same,
    draft,
    edit_config,
    edit_tensors,
    make_drafter,
    make_target,
    write_dflash,
    write_modelopt,
    write_specforge,
    write_speculators,
)
from tiny import one_thread  # noqa: F401
from transformers import Qwen3ForCausalLM
from transformers.models.muse_glimmer_assistant.configuration_muse_glimmer_assistant import MuseGlimmerAssistantConfig
from transformers.models.muse_glimmer_assistant.modeling_muse_glimmer_assistant import MuseGlimmerAssistantModel

from hf_dspark import DSparkConfig, DSparkDraftModel
from hf_dspark.errors import CheckpointError
from hf_dspark.formats import read_checkpoint

PARALLEL = dict(markov_rank=0, enable_confidence_head=False, sample_from_anchor=False)


@pytest.fixture(scope="module")
def target() -> Qwen3ForCausalLM:
    return make_target()


def build(packaging: str, folder: Path, target: Qwen3ForCausalLM, changes: dict | None = None) -> Path:
    """A sound checkpoint in a packaging."""
    if packaging == "speculators":
        return write_speculators(folder, make_drafter(**(changes or {})), target)
    if packaging == "reduced":
        return write_speculators(folder, make_drafter(draft_vocab_size=20, **(changes or {})), target)
    if packaging == "dflash":
        return write_dflash(folder, make_drafter(**PARALLEL | (changes or {})))
    return {"specforge": write_specforge, "modelopt": write_modelopt}[packaging](folder, make_drafter(**(changes or {})))


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


def test_specforge_keeps_its_own_rope(tmp_path, target):
    rope = {"rope_type": "yarn", "rope_theta": 5e5, "factor": 4.0, "original_max_position_embeddings": 32}
    drafter = make_drafter(rope_parameters=rope)
    scaling = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
    folder = write_specforge(tmp_path / "d", drafter, rope_scaling=scaling)
    config = drafts_as(folder, drafter, target)
    assert config.rope_parameters["rope_type"] == "yarn" and config.rope_parameters["rope_theta"] == 5e5


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


LAYERS = "transformer_layer_config"


@pytest.mark.parametrize(
    ("packaging", "changes", "match"),
    [
        ("speculators", dict(speculators_model_type="eagle3"), "`speculators_model_type` must be 'dspark', got 'eagle3'"),
        ("speculators", dict(speculators_model_type=...), "`speculators_model_type` must be 'dspark', got None"),
        ("speculators", {LAYERS: ...}, f"no `{LAYERS}`"),
        ("speculators", {LAYERS: 3}, f"`{LAYERS}` must be an object"),
        ("speculators", {LAYERS: dict(model_type="llama")}, "`model_type` must be 'qwen3', got 'llama'"),
        ("speculators", {LAYERS: dict(rope_theta=None)}, "`rope_parameters` must be an object"),
        ("speculators", {LAYERS: dict(head_dim=None)}, "has no `head_dim`"),
        ("speculators", {LAYERS: dict(rope_is_neox_style=False)}, "`rope_is_neox_style` is False"),
        ("speculators", dict(markov_rank=...), "has no `markov_rank`"),
        ("speculators", dict(mask_token_id=None), "has no `mask_token_id`"),
        ("speculators", dict(mask_token_id=2), r"`mask_token_id` \(2\) is also the eos token"),
        ("speculators", dict(aux_hidden_state_layer_ids=...), "has no `aux_hidden_state_layer_ids`"),
        ("speculators", dict(aux_hidden_state_layer_ids=[-1, 2]), "`aux_hidden_state_layer_ids` must be a list of whole"),
        ("speculators", dict(aux_hidden_state_layer_ids="12"), "`aux_hidden_state_layer_ids` must be a list of whole"),
        ("speculators", dict(aux_hidden_state_layer_ids=[3, 1]), "`target_layer_ids` must be a strictly increasing"),
        ("speculators", dict(aux_hidden_state_layer_ids=[1, 2, 3]), "`fc.weight` must have shape"),
        ("speculators", dict(sample_from_anchor=False), "`speculative_tokens` is 4 .* `sample_from_anchor` False"),
        ("speculators", dict(sample_from_anchor="yes"), "`sample_from_anchor` must be true or false"),
        ("speculators", dict(block_size=5), "`speculative_tokens` is 4 .* of 5, but by `sample_from_anchor` True"),
        ("speculators", dict(sample_from_anchor=..., block_size=9), "`speculative_tokens` is 4 .* neither an anchor"),
        ("speculators", dict(speculators_config={"algorithm": "eagle3"}), "`algorithm` must be 'dspark'"),
        ("speculators", dict(speculators_config={"proposal_methods": 3}), "`proposal_methods` must be a list"),
        ("speculators", dict(speculators_config=[1]), "`speculators_config` must be an object"),
        (
            "speculators",
            dict(speculators_config={"proposal_methods": [{"speculative_tokens": 4}, {"speculative_tokens": 3}]}),
            r"`speculative_tokens` must be one positive number, got \[4, 3\]",
        ),
        ("speculators", dict(draft_vocab_size=20), "`draft_vocab_size` is 20 .*, but the weights lack `d2t`"),
        ("speculators", dict(enable_confidence_head=False), "`enable_confidence_head` is False, but the weights also"),
        ("speculators", dict(target_hidden_size=64), "`fc.weight` must have shape"),
        ("reduced", dict(draft_vocab_size=61), "`draft_vocab_size` is None .* the weights also hold `d2t`"),
        ("reduced", dict(draft_vocab_size=62), "`draft_vocab_size` must lie between 1 and `vocab_size`"),
        ("reduced", dict(draft_vocab_size=21), "must have shape .*21"),
        ("specforge", dict(dflash_config=...), "of no known drafter"),
        ("specforge", dict(dflash_config=[]), "`dflash_config` must be an object"),
        ("specforge", dict(mask_token_id=59), "contradicts itself: `mask_token_id` is 59, and 60"),
        ("specforge", dict(model_type="lfm2"), "`model_type` must be 'qwen3', got 'lfm2'"),
        ("specforge", dict(sample_from_anchor=False), "`sample_from_anchor` must be"),
        ("specforge", dict(attention_mode="mla"), "`attention_mode` is 'mla'"),
        ("specforge", dict(confidence_temperatures=[1.0] * 4), "`confidence_temperatures` is .* Ornith"),
        ("specforge", dict(num_target_layers=3), "`target_layer_ids` names the target's last layer"),
        ("specforge", dict(layer_types=["full_attention", "sliding_attention"]), "`layer_types` must be all"),
        ("modelopt", dict(use_swa=True), "`use_swa` is True"),
        ("modelopt", dict(causal=True), "contradicts itself: `causal` is True, and False"),
        ("modelopt", dict(enable_confidence_head=False), "`use_confidence_head` whether"),
        ("dflash", dict(dflash_config=...), "`dflash_config` must be an object"),
        ("dflash", dict(markov_rank=6), "no heads, but `markov_rank` is 6"),
        ("dflash", dict(sample_from_anchor=True), "no heads, but `sample_from_anchor` is True"),
        ("dflash", dict(block_size=...), "has no `block_size`"),
        ("dflash", dict(use_sliding_window=True, layer_types=...), "`use_sliding_window` is True, but `layer_types`"),
        ("dflash", dict(model_type="gpt_oss"), "`model_type` must be 'qwen3'"),
    ],
)  # fmt: skip
def test_config_is_refused(tmp_path, target, packaging, changes, match):
    folder = build(packaging, tmp_path / "d", target)
    layers = changes.get(LAYERS)
    if isinstance(layers, dict):
        changes = {LAYERS: json.loads((folder / "config.json").read_text())[LAYERS] | layers}
    edit_config(folder, **changes)
    with pytest.raises(CheckpointError, match=match):
        DSparkDraftModel.from_pretrained(folder)


@pytest.mark.parametrize("non_causal", [False, None, "yes"])
def test_a_causal_window_is_refused(tmp_path, target, non_causal):
    folder = build("speculators", tmp_path / "d", target, dict(sliding_window=5))
    edit_config(folder, sliding_window_non_causal=non_causal)
    with pytest.raises(CheckpointError, match="`sliding_window_non_causal` must be true for sliding layers"):
        DSparkDraftModel.from_pretrained(folder)


@pytest.mark.parametrize(
    ("packaging", "changes", "match"),
    [
        ("reduced", dict(d2t=None), "the weights lack `d2t`"),
        ("reduced", dict(t2d=None), "the weights lack `t2d`"),
        ("reduced", dict(d2t=lambda t: t + 1), "`t2d` must mark exactly the 20"),
        ("reduced", dict(lm_head__weight=lambda t: t[1:]), r"`lm_head.weight` must have shape \[20, 32\]"),
        ("reduced", dict(markov_head__markov_w2__weight=lambda t: torch.cat([t] * 3)[:61]), "markov_w2.weight` must have"),
        ("reduced", dict(markov_head__markov_w1__weight=lambda t: t[:20]), "markov_w1.weight` must have shape"),
        ("speculators", dict(markov_head__markov_w1__weight=lambda t: t.T), "markov_w1.weight` .* it is transposed"),
        ("speculators", dict(d2t=torch.zeros(61, dtype=torch.long)), "the weights also hold `d2t`"),
        ("speculators", dict(confidence_head__proj__bias=None), "the weights lack `confidence_head.proj.bias`"),
        ("speculators", dict(fc__weight=lambda t: t / 0), "`fc.weight` must be finite"),
        ("specforge", dict(embed_tokens__weight=torch.ones(61, 32)), "the weights also hold `embed_tokens.weight`"),
        ("modelopt", dict(markov_w2__weight=None), "the weights lack `markov_head.markov_w2.weight`"),
        ("modelopt", dict(markov_head__markov_w1__weight=torch.ones(61, 6)), "hold both `markov_w1.weight` and"),
        ("dflash", dict(markov_head__markov_w1__weight=torch.ones(61, 6)), "`markov_rank` is 0 .* also hold"),
        ("dflash", dict(hidden_norm__weight=None), "the weights lack `hidden_norm.weight`"),
    ],
)  # fmt: skip
def test_weights_are_refused(tmp_path, target, packaging, changes, match):
    folder = build(packaging, tmp_path / "d", target)
    edit_tensors(folder, **changes)
    with pytest.raises(CheckpointError, match=match):
        DSparkDraftModel.from_pretrained(folder)
