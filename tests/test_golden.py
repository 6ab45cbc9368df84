"""The reference implementation's own rounds: same text, same drafts, same lengths, same numbers on the way.

The golden folder holds a toy target, a drafter saved by the reference code, and what that code did with them. It is found
beside the repository, or where HF_DSPARK_SHARED says.
"""

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tiny import one_thread  # noqa: F401
from transformers import AutoModelForCausalLM

from hf_dspark import DSparkCandidateGenerator, DSparkDraftModel

SHARED = Path(os.environ.get("HF_DSPARK_SHARED", Path(__file__).parents[2] / "shared"))
GOLDEN = SHARED / "golden"
DRAFTER = GOLDEN / "dspark_vanilla"

pytestmark = pytest.mark.skipif(not GOLDEN.is_dir(), reason=f"no golden folder at {GOLDEN}; set HF_DSPARK_SHARED")


@pytest.fixture(scope="module")
def target():
    return AutoModelForCausalLM.from_pretrained(GOLDEN / "target", dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def drafter(target):
    return DSparkDraftModel.from_pretrained(DRAFTER, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def cases():
    return json.loads((DRAFTER / "reference.json").read_text())["cases"]


def generate(target, drafter, case, extra=0):
    prompt = torch.tensor([case["prompt"]])
    drafter.scheduling, drafter.confidence_threshold = "threshold", case["threshold"]  # 0.0 keeps everything
    return target.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        assistant_model=drafter,
        max_new_tokens=len(case["output"]) - len(case["prompt"]) + extra,
        eos_token_id=None,
        do_sample=False,
    )[0].tolist()


@pytest.mark.parametrize("index", range(8))
def test_rounds(target, drafter, cases, index, monkeypatch):
    case = cases[index]
    proposed, scheduled, accepted = [], [], []
    propose, book = DSparkCandidateGenerator.propose, DSparkCandidateGenerator.book

    def recording_propose(self, *arguments):
        block = propose(self, *arguments)
        proposed.append([] if block is None else block.tokens[0].tolist())
        return block

    def recording_book(self, lengths, agreed, *others):
        scheduled.extend(lengths)
        accepted.extend(agreed)
        book(self, lengths, agreed, *others)

    monkeypatch.setattr(DSparkCandidateGenerator, "propose", recording_propose)
    monkeypatch.setattr(DSparkCandidateGenerator, "book", recording_book)
    # The reference drafts past the end of the text; given some room there, every one of its rounds is ours.
    text = generate(target, drafter, case, extra=2 * drafter.config.num_draft_tokens)
    assert text[: len(case["output"])] == case["output"]
    count = len(case["rounds"])
    assert scheduled[:count] == case["proposal_lengths"]
    assert [number + 1 for number in accepted[:count]] == case["acceptance_lengths"]
    assert proposed[:count] == [one["tokens"][: one["kept"]] for one in case["rounds"]]
    monkeypatch.setattr(DSparkCandidateGenerator, "propose", propose)
    assert generate(target, drafter, case) == case["output"]


@pytest.mark.parametrize("index", range(8))
def test_tensors(target, drafter, cases, index):
    """Backbone states, base logits, logits after the Markov bias and confidence logits of the first four rounds."""
    seen = {"hidden": [], "base": [], "bias": [], "conf": []}
    hooks = [
        drafter.norm.register_forward_hook(lambda *call: seen["hidden"].append(call[-1][0])),
        drafter.markov_head.markov_w2.register_forward_hook(lambda *call: seen["bias"].append(call[-1][0])),
        drafter.confidence_head.register_forward_hook(lambda *call: seen["conf"].append(call[-1][0])),
        target.lm_head.register_forward_hook(lambda *call: seen["base"].append(call[-1][0])),
    ]
    try:
        generate(target, drafter, cases[index])
    finally:
        for hook in hooks:
            hook.remove()
    length = drafter.config.num_draft_tokens
    bases = seen["base"][1::2]  # between the target's own calls of its head: prefill, draft, verify, draft, …
    biases = torch.stack(seen["bias"]).split(length)
    reference = load_file(DRAFTER / "reference_tensors.safetensors")
    for number in range(4):
        ours = {
            "hidden": seen["hidden"][number],
            "base": bases[number],
            "logits": bases[number] + biases[number],
            "conf": seen["conf"][number],
        }
        for name, tensor in ours.items():
            expected = reference[f"case{index}.round{number}.{name}"]
            torch.testing.assert_close(tensor, expected, atol=1e-4, rtol=1e-4)
