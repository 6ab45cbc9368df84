"""A packed model computes, holds and saves the same as before."""

import pytest
import torch
from tiny import padded_prompts, tiny_drafter, tiny_target
from torch import nn
from transformers import AutoModelForCausalLM

from hf_dspark import pack_linears
from hf_dspark.packing import PackedLinear

INPUT_IDS = torch.arange(4, 24).view(2, 10)


@torch.no_grad()
def logits(model, input_ids=INPUT_IDS):
    return model(input_ids=input_ids).logits


@pytest.mark.parametrize("config", [{}, {"tie_word_embeddings": True}, {"attention_bias": True, "mlp_bias": True}])
@pytest.mark.parametrize("rows", [1, 8])
def test_same_logits(config, rows):
    target = tiny_target(**config)
    for name, bias in target.named_parameters():
        if name.endswith("bias"):
            nn.init.normal_(bias)
    expected = [logits(target, ids) for ids in (INPUT_IDS, INPUT_IDS[:1, :1])]
    packed = pack_linears(target, rows)
    assert packed is target
    kinds = {type(module) for module in target.modules()}
    assert PackedLinear in kinds and nn.Linear not in kinds
    for ids, wanted in zip((INPUT_IDS, INPUT_IDS[:1, :1]), expected, strict=True):
        torch.testing.assert_close(logits(target, ids), wanted, rtol=1e-5, atol=1e-5)


def test_weights_are_shared_and_saved_as_before(tmp_path):
    target = tiny_target(tie_word_embeddings=True)
    expected, before = logits(target), {name: value.data_ptr() for name, value in target.state_dict().items()}
    pack_linears(target)
    assert {name: value.data_ptr() for name, value in target.state_dict().items()} == before
    assert target.get_output_embeddings().weight is target.get_input_embeddings().weight

    plain = tiny_target(tie_word_embeddings=True)
    for model, folder in ((plain, "plain"), (target, "packed")):
        model.save_pretrained(tmp_path / folder)
    saved = [(tmp_path / folder / "model.safetensors").read_bytes() for folder in ("plain", "packed")]
    assert saved[0] == saved[1]
    torch.testing.assert_close(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "packed")), expected)


def test_gradients_pass_through():
    target = pack_linears(tiny_target().requires_grad_(False))
    states = torch.randn(3, 32, requires_grad=True)
    target.get_output_embeddings()(states).square().sum().backward()
    weight = target.get_output_embeddings().weight
    torch.testing.assert_close(states.grad, 2 * states.detach() @ weight.T @ weight)


def test_autocast():
    target = tiny_target()
    with torch.autocast("cpu", torch.bfloat16):
        expected = logits(target)
        torch.testing.assert_close(logits(pack_linears(target)), expected)


def test_a_packed_model_may_change_its_dtype():
    packed, plain = pack_linears(tiny_target()).double(), tiny_target().double()
    torch.testing.assert_close(logits(packed), logits(plain))


def test_generate_with_a_drafter():
    target = tiny_target()
    drafter = tiny_drafter(target)
    pack_linears(target)
    inputs = padded_prompts([3, 6])
    options = {"max_new_tokens": 20, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    plain = target.generate(**inputs, **options)
    assert torch.equal(target.generate(**inputs, **options, assistant_model=drafter), plain)
    assert drafter.statistics.accepted > 0


def test_other_models_are_refused(monkeypatch):
    with pytest.raises(ValueError, match=r"no float32 nn\.Linear on the processor .* dtype=torch\.float32"):
        pack_linears(tiny_target().to(torch.bfloat16))
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    with pytest.raises(RuntimeError, match="oneDNN"):
        pack_linears(tiny_target())
