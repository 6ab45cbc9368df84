"""Gemma4 drafters: their numbers are those of a transcription in plain PyTorch; they decode, save and export as others do."""

import json
from pathlib import Path

import pytest
import torch
from packagings import (
    GEMMA4,
    PARALLEL,
    assert_same,
    draft,
    edit_tensors,
    make_config,
    make_drafter,
    make_gemma4_target,
    make_target,
    write_gemma4,
)
from safetensors.torch import load_file
from tiny import one_thread, padded_prompts  # noqa: F401

from hf_dspark import DSparkDraftModel
from hf_dspark.errors import CheckpointError
from hf_dspark.formats.export import export_checkpoint
from hf_dspark.training.initialization import start_from_target
from hf_dspark.training.regression_start import start_from_regression

FORMS = [{}, dict(attention_k_eq_v=False, num_key_value_heads=2)]
PROMPT, TOKENS = (5, 9, 11, 3), (7, 3, 4, 5)


@pytest.fixture(scope="module")
def target():
    return make_gemma4_target()


def transcribed(folder: Path, states: list[torch.Tensor]) -> list[torch.Tensor]:
    """States, base logits, Markov bias and confidence of one block, from the files and the target's hidden states alone."""
    config, weights = json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")
    width, head_dim, heads = config["hidden_size"], config["global_head_dim"], config["num_attention_heads"]
    shared = config["attention_k_eq_v"]
    key_heads = config["num_global_key_value_heads"] if shared else config["num_key_value_heads"]

    def norm(x, name=None):
        x = x / (x.square().mean(-1, keepdim=True) + config["rms_norm_eps"]).sqrt()
        return x if name is None else x * weights[f"{name}.weight"]

    def linear(x, name):
        return x @ weights[f"{name}.weight"].T

    # Rope: a quarter of the angles turns, at the speeds it would have if all did; the others stand still.
    rope = config["rope_parameters"]["full_attention"]
    numbers = torch.arange(head_dim // 2)
    speeds = rope["rope_theta"] ** (-2.0 * numbers / head_dim)
    speeds = speeds.where(numbers < rope["partial_rotary_factor"] * head_dim / 2, 0.0)

    def rotate(x, positions):  # (S, heads, head_dim)
        angle = positions[:, None, None] * speeds
        low, high = x[..., : head_dim // 2], x[..., head_dim // 2 :]
        return torch.cat([low * angle.cos() - high * angle.sin(), high * angle.cos() + low * angle.sin()], dim=-1)

    context = norm(linear(torch.cat([states[i + 1][0] for i in config["target_layer_ids"]], dim=-1), "fc"), "hidden_norm")
    block = torch.tensor([TOKENS[0]] + [config["mask_token_id"]] * (config["block_size"] - 1))
    x = weights["embed_tokens.weight"][block] * width**0.5
    positions = torch.arange(len(context) + len(block), dtype=torch.float)
    for layer in range(config["num_hidden_layers"]):
        name = f"layers.{layer}"
        inner = norm(x, f"{name}.input_layernorm")
        sources = torch.cat([context, inner])
        queries = norm(linear(inner, f"{name}.self_attn.q_proj").view(-1, heads, head_dim), f"{name}.self_attn.q_norm")
        raw = linear(sources, f"{name}.self_attn.k_proj").view(-1, key_heads, head_dim)
        values = raw if shared else linear(sources, f"{name}.self_attn.v_proj").view(-1, key_heads, head_dim)
        queries = rotate(queries, positions[len(context) :])
        keys = rotate(norm(raw, f"{name}.self_attn.k_norm"), positions)
        keys, values = (t.repeat_interleave(heads // key_heads, dim=1) for t in (keys, norm(values)))
        attended = torch.einsum("qhd,shd->hqs", queries, keys).softmax(-1)  # of the scale 1
        attended = torch.einsum("hqs,shd->qhd", attended, values).flatten(1)
        x = x + norm(linear(attended, f"{name}.self_attn.o_proj"), f"{name}.post_attention_layernorm")
        inner = norm(x, f"{name}.pre_feedforward_layernorm")
        gate = torch.nn.functional.gelu(linear(inner, f"{name}.mlp.gate_proj"), approximate="tanh")
        inner = linear(gate * linear(inner, f"{name}.mlp.up_proj"), f"{name}.mlp.down_proj")
        x = (x + norm(inner, f"{name}.post_feedforward_layernorm")) * weights[f"{name}.layer_scalar"]
    hidden, cap = norm(x, "norm"), config["final_logit_softcapping"]
    base = (linear(hidden, "lm_head") / cap).tanh() * cap
    before = weights["markov_head.markov_w1.weight"][torch.tensor(TOKENS)]
    bias = before @ weights["markov_head.markov_w2.weight"].T
    confidence = linear(torch.cat([hidden, before], dim=-1), "confidence_head.proj") + weights["confidence_head.proj.bias"]
    return [hidden, base, bias, confidence[:, 0]]


@pytest.mark.parametrize("changes", FORMS, ids=["k_eq_v", "v_proj"])
def test_drafts_equal_the_transcription(tmp_path, target, changes):
    folder = write_gemma4(tmp_path / "d", make_drafter(**GEMMA4 | changes), target)
    drafter = DSparkDraftModel.from_pretrained(folder)
    with torch.no_grad():
        states = target(torch.tensor([PROMPT]), output_hidden_states=True).hidden_states
    expected, found = transcribed(folder, states), draft(drafter, target, PROMPT, TOKENS)
    assert expected[1].abs().max() > 1  # the cap bends them
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours[0], theirs, rtol=0, atol=1e-5)
    edit_tensors(folder, layers__0__layer_scalar=lambda scalar: scalar * 1.01)  # the comparison can fail
    assert not torch.allclose(transcribed(folder, states)[0], found[0][0], rtol=0, atol=1e-5)


@pytest.mark.parametrize("changes", FORMS, ids=["k_eq_v", "v_proj"])
def test_own_and_deepspec_packaging_draft_alike_and_write_the_same_bytes(tmp_path, target, changes):
    drafter = make_drafter(torch.bfloat16, **GEMMA4 | changes)
    drafter.save_pretrained(tmp_path / "own")
    own = DSparkDraftModel.from_pretrained(tmp_path / "own")
    own.save_pretrained(tmp_path / "own again")
    export_checkpoint(own, tmp_path / "deepspec", "deepspec", target)
    deepspec = DSparkDraftModel.from_pretrained(tmp_path / "deepspec")
    export_checkpoint(deepspec, tmp_path / "deepspec again", "deepspec", target)
    for name in ("own", "deepspec"):
        for file in ("config.json", "model.safetensors"):
            assert (tmp_path / name / file).read_bytes() == (tmp_path / f"{name} again" / file).read_bytes()
    assert DSparkDraftModel.from_pretrained(tmp_path / "own").config.to_json_string() == deepspec.config.to_json_string()
    assert_same(draft(deepspec, target), draft(own, target))
    written, listed = (json.loads((path / "config.json").read_text()) for path in (
        tmp_path / "deepspec", write_gemma4(tmp_path / "listed", drafter, target)
    ))  # fmt: skip
    del listed["rope_parameters"]["rope_type"], listed["rope_parameters"]["rope_theta"]  # strays of some files
    if changes:
        listed["num_global_key_value_heads"] = None
    assert {name: written.get(name) for name in listed} == listed
    tensors, expected = (load_file(tmp_path / name / "model.safetensors") for name in ("deepspec", "listed"))
    assert tensors.keys() == expected.keys()
    assert all(torch.equal(tensors[name], expected[name]) for name in tensors)


@pytest.mark.parametrize("lengths", [[4], [4, 7]], ids=["one row", "two rows"])
def test_texts_are_the_targets(target, lengths):
    inputs = padded_prompts(lengths, vocab_size=61)
    drafter = make_drafter(**GEMMA4)
    plain = target.generate(**inputs, max_new_tokens=24, do_sample=False)
    assert torch.equal(target.generate(**inputs, assistant_model=drafter, max_new_tokens=24, do_sample=False), plain)
    assert drafter.statistics.drafted > 0


def test_a_pair_with_another_cap_is_refused(target):
    with pytest.raises(ValueError, match=r"`final_logit_softcapping` of the drafter is 5\.0, the target's is 3\.0"):
        make_drafter(**GEMMA4 | dict(final_logit_softcapping=5.0)).bind(target)
    make_drafter(**GEMMA4 | dict(final_logit_softcapping=None)).bind(target)


def test_what_cannot_be_written(tmp_path, target):
    for packaging, changes in (("speculators", {}), ("dflash", PARALLEL)):
        with pytest.raises(CheckpointError, match="cannot express `backbone_type` 'gemma4'"):
            export_checkpoint(make_drafter(**GEMMA4 | changes), tmp_path / "d", packaging, target)
    uncapped = make_drafter(**GEMMA4 | dict(final_logit_softcapping=None))
    with pytest.raises(CheckpointError, match="`backbone_type` is 'gemma4', and `model_type` of this target is 'qwen3'"):
        export_checkpoint(uncapped, tmp_path / "d", "deepspec", make_target())
    with pytest.raises(CheckpointError, match="`backbone_type` is 'qwen3', and `model_type` of this target is 'gemma4_text'"):
        export_checkpoint(make_drafter(), tmp_path / "d", "deepspec", target)


def test_starts_that_set_qwen3_layers_are_refused(target):
    drafter = make_drafter(**GEMMA4)
    for start in (start_from_target, lambda *pair: start_from_regression(*pair, [])):
        with pytest.raises(ValueError, match=r"`backbone_type` must be 'qwen3' .*, got 'gemma4'"):
            start(drafter, target)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        (dict(backbone_type="llama"), "`backbone_type` must be one of qwen3, gemma4, got 'llama'"),
        (dict(attention_k_eq_v=True), "`attention_k_eq_v` is for `backbone_type` 'gemma4'"),
        (dict(final_logit_softcapping=0.0), "`final_logit_softcapping` must be positive or None, got 0.0"),
    ],
)
def test_configuration_is_refused(changes, match):
    with pytest.raises(Exception, match=match):
        make_config(**changes)
