"""The doctor: times add up, break-even is right by hand, and each trouble is found where it has been made."""

from __future__ import annotations

import copy
import json

import pytest
import torch
from tiny import jagged_profile, one_thread, tiny_drafter, tiny_target  # noqa: F401
from tiny_tokenizer import text, tiny_tokenizer

from hf_dspark import DSparkDraftModel, LoadProfile, pack_linears
from hf_dspark.card import model_card
from hf_dspark.doctor import describe, examine, stated_acceptance

PROMPTS = [text([7 + n, 30, 9]) for n in range(3)]
CHEAP = LoadProfile({1: 100.0, 2: 98.0, 6: 92.0, 64: 40.0}, draft_seconds=0.001)


@pytest.fixture(scope="module")
def target():
    return tiny_target("qwen3", seed=3)


def report_on(target, drafter, tokenizer=None, profile=CHEAP):
    drafter.load_profile = profile
    report = examine(target, tokenizer or tiny_tokenizer(), drafter, PROMPTS, max_new_tokens=24, profile=profile)
    assert json.loads(json.dumps(report)) == report
    lines = describe(report)
    assert all(finding["text"] in lines for finding in report["findings"])
    assert drafter.load_profile is profile and drafter.on_round is None
    return report, {finding["name"] for finding in report["findings"]}


def test_numbers(target):
    drafter = tiny_drafter(target)
    report, names = report_on(target, drafter)
    assert not names & {"does not pay", "other mode", "foreign profile", "no profile", "mismatch", "target", "prompt form"}
    assert ("pack" in names) == torch.backends.mkldnn.is_available()
    assert sum(report["seconds"].values()) == pytest.approx(1)
    assert len(report["acceptance"]) == len(report["lengths"]) == 5
    first, second = report["lengths"][:2]
    assert first["break_even"] == pytest.approx((0.001 + 1 / 98) / 0.01)
    assert first["tau"] == pytest.approx(1 + report["acceptance"][0])
    assert second["tau"] - first["tau"] == pytest.approx(report["acceptance"][0] * report["acceptance"][1])
    assert second["ratio"] == pytest.approx(second["tau"] / second["break_even"])
    assert 1 < report["tau"] < 6 and report["modes"]["full"] > 1
    assert "Draft length" in describe(report) and "Expected by mode" in describe(report)


def test_a_profile_is_measured_when_none_is_given(target):
    drafter = tiny_drafter(target)
    report = examine(target, tiny_tokenizer(), drafter, PROMPTS[:1], max_new_tokens=12)
    assert drafter.load_profile is None and "no profile" in {finding["name"] for finding in report["findings"]}
    with pytest.raises(ValueError, match="`prompts` must hold a prompt"):
        examine(target, tiny_tokenizer(), drafter, [])


def test_dear_drafts(target):
    dear = LoadProfile({1: 100.0, 2: 20.0, 6: 10.0}, draft_seconds=0.05)
    assert "does not pay" in report_on(target, tiny_drafter(target), profile=dear)[1]


def test_longer_blocks(target):
    short = tiny_drafter(target, own_share=0.0, block_size=2)
    assert "longer block" in report_on(target, short)[1]


def test_other_mode(target):
    """Early stopping ends at the first bad step of a jagged curve, which other modes look past."""
    stairs = LoadProfile({1: 100.0, 2: 40.0, 6: 90.0}, draft_seconds=0.001)
    drafter = tiny_drafter(target, own_share=0.0)
    drafter.scheduling = "early_stop"
    assert "other mode" in report_on(target, drafter, profile=stairs)[1]


def test_packing_and_foreign_profile(target):
    drafter, packed = tiny_drafter(target), copy.deepcopy(target)
    if torch.backends.mkldnn.is_available():
        pack_linears(packed)
    foreign = LoadProfile(CHEAP.steps_per_second, 0.001, measured_on={"threads": "64"})
    _, names = report_on(packed, drafter, profile=foreign)
    assert "pack" not in names and "foreign profile" in names


def test_a_profile_that_came_along_from_elsewhere_stays_aside(target, tmp_path):
    drafter = tiny_drafter(target)
    drafter.load_profile = LoadProfile(CHEAP.steps_per_second, 0.001, measured_on={"threads": "64"})
    drafter.save_pretrained(tmp_path)
    loaded = DSparkDraftModel.from_pretrained(tmp_path)
    report = examine(target, tiny_tokenizer(), loaded, PROMPTS, max_new_tokens=12, profile=CHEAP)
    assert "foreign profile" in {finding["name"] for finding in report["findings"]}
    assert loaded.load_profile is None


def test_the_drafters_own_threshold_is_simulated(target):
    drafter, ratios = tiny_drafter(target, own_share=0.5), []
    for drafter.confidence_threshold, drafter.threshold_on in ((0.0, "conditional"), (1.0, "conditional"), (0.3, "cumulative")):
        ratios.append(report_on(target, drafter)[0]["modes"]["threshold"])
    assert len(set(ratios)) == 3


def test_another_target_is_suspected(target):
    drafter = tiny_drafter(tiny_target(seed=7), own_share=0.0)
    report, names = report_on(target, drafter)
    assert names >= {"mismatch", "target"} and "prompt form" not in names
    assert report["acceptance"][0] < 0.25


def test_what_the_card_states_is_the_measure(tmp_path):
    target = tiny_target("qwen3", seed=4)
    drafter = tiny_drafter(target, own_share=0.0)
    assert stated_acceptance(drafter) is None
    drafter.save_pretrained(tmp_path)
    drafter = DSparkDraftModel.from_pretrained(tmp_path)
    drafter.name_or_path = "someone/drafter"  # as from the Hub, whose files lie elsewhere
    for stated, suspicious in ((1.0, True), (0.5, False)):
        entry = {"position": 1, "conditional": stated}
        results = [
            {"setting": setting, "prompts": name, "tau": 2.0, "reliability": [entry] * 5}
            for setting, name in (("T=0", "a"), ("T=0", "b"), ("T=1", "a"))
        ]
        results.append(results[0] | {"prompts": "all", "reliability": [{"position": 1, "conditional": 0.9}] * 5})
        model_card(drafter, "mine", "user/target", results=results).save(tmp_path / "README.md")
        assert stated_acceptance(drafter) == pytest.approx(stated, abs=0.006)
        report, names = report_on(target, drafter)
        assert report["acceptance"][0] < 0.6 and ("mismatch" in names) == suspicious
        assert f"its card states {stated:.2f}" in describe(report)


def test_the_form_of_the_prompt_is_found_out(target, monkeypatch):
    """A template that puts the target into a mode of which the drafter knows nothing, and a switch for it."""
    drafter = tiny_drafter(target, own_share=0.0)
    stubborn = copy.deepcopy(target)
    tokenizer = tiny_tokenizer()
    thinking = text([40, 41, 40, 41])
    tokenizer.chat_template = (
        "<s>{% for message in messages %} {{ message.content }}{% endfor %}"
        "{% if enable_thinking is not defined or enable_thinking %} " + thinking + "{% endif %}"
    )
    marker = int(tokenizer(thinking)["input_ids"][0])

    def distracted(module, arguments, kwargs, output):
        """Behind the marker the target says what the drafter does not expect."""
        if module.told:
            output.logits = output.logits.roll(7, dims=-1)

    def listen(module, arguments, kwargs):
        ids = kwargs.get("input_ids")
        if ids is not None and ids.shape[1] > 2 and kwargs["cache"].get_seq_length() == 0:  # the prefill
            module.told = bool((ids == marker).any())

    stubborn.told = False
    stubborn.register_forward_pre_hook(listen, with_kwargs=True)
    stubborn.register_forward_hook(distracted, with_kwargs=True)
    report, names = report_on(stubborn, drafter, tokenizer)
    assert "prompt form" in names and "target" not in names
    blamed = [finding["text"] for finding in report["findings"] if finding["name"] == "prompt form"]
    assert any("enable_thinking=False" in line for line in blamed)
    assert not any("enable_thinking=True" in line for line in blamed)


def test_answers_without_a_draft_prove_nothing(target):
    drafter = tiny_drafter(target)
    report = examine(target, tiny_tokenizer(), drafter, PROMPTS, max_new_tokens=2, profile=CHEAP)
    assert report["acceptance"] == [None] * 5 and report["modes"] == {}
    assert [finding["name"] for finding in report["findings"]][:1] == ["no drafts"]
    assert "longer answers" in describe(report)


def test_confidences_that_promise_too_little(target):
    drafter = tiny_drafter(target)
    with torch.no_grad():
        drafter.confidence_head.proj.weight.zero_()
        drafter.confidence_head.proj.bias.fill_(-1.0)
    assert "calibration" in report_on(target, drafter, profile=jagged_profile())[1]
