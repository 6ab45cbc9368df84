"""The drafter that travels with the package, on the real target."""

from __future__ import annotations

import pytest
import torch

from hf_dspark import DSparkDraftModel, LoadProfile
from hf_dspark.demo import DRAFTER_FOLDER
from hf_dspark.evaluation import encode_prompts, match_texts

PROMPTS = ("Write a Python function that adds two numbers.", "What is the capital of France?", "Count from one to twenty.")


@pytest.fixture(scope="module")
def drafter() -> DSparkDraftModel:
    return DSparkDraftModel.from_pretrained(DRAFTER_FOLDER, dtype=torch.float32)


def test_it_is_small_and_carries_its_card_and_profile(drafter):
    assert sum(path.stat().st_size for path in DRAFTER_FOLDER.glob("*.safetensors")) <= 32 * 2**20
    assert drafter.load_profile is not None and not drafter.load_profile.is_flat
    card = (DRAFTER_FOLDER / "README.md").read_text(encoding="utf-8")
    assert card.startswith("---\n") and "base_model: HuggingFaceTB/SmolLM2-135M-Instruct" in card


@pytest.mark.parametrize("mode", [None, "full"])
def test_greedy_text_is_the_targets(smollm2, drafter, mode):
    target, tokenizer = smollm2
    drafter.scheduling = mode
    # Plain steps priced out of reach: the scheduler has to draft.
    drafter.load_profile = LoadProfile({1: 1.0, 2: 0.99, 6: 0.98}, 0.001)
    inputs = encode_prompts(tokenizer, PROMPTS)
    plain = target.generate(**inputs, max_new_tokens=32, do_sample=False)
    drafted = target.generate(**inputs, max_new_tokens=32, do_sample=False, assistant_model=drafter)
    for row in range(len(PROMPTS)):
        match = match_texts(target, plain[row], drafted[row], inputs["attention_mask"][row], tokenizer.pad_token_id)
        assert match in ("same", "near-tie")
    assert drafter.statistics.tau > 1.2  # a drafter of another target, or read wrongly, stays near 1


def test_sampling_accepts_too(smollm2, drafter):
    target, tokenizer = smollm2
    drafter.scheduling = "full"
    torch.manual_seed(0)
    target.generate(
        **encode_prompts(tokenizer, PROMPTS[:1]), max_new_tokens=32, do_sample=True, top_k=50, assistant_model=drafter
    )
    assert 0 < drafter.statistics.accepted < drafter.statistics.scheduled
