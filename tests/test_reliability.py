"""What evaluation says about confidences, on blocks whose quality is known, and the commands around it."""

import json
import math
import random

import numpy as np
import pytest
import torch
from tiny import PAD, jagged_profile, tiny_drafter, tiny_target
from tiny_tokenizer import text, tiny_tokenizer

from hf_dspark import Round
from hf_dspark.evaluation import (
    Block,
    Calibration,
    draw_evaluation,
    encode_prompts,
    error_by_chance,
    evaluate,
    expected_calibration_error,
    fit_calibration,
    read_prompt_sets,
    recorded_blocks,
    reliability,
    roll_out,
    set_calibration,
    threshold_sweep,
)

PROMPTS = [text(tokens) for tokens in ([7, 9], [11, 8, 30, 21], [12], [20, 31, 44, 17, 19, 6])]
OPTIONS = {"max_new_tokens": 30, "eos_token_id": None, "pad_token_id": PAD}


def simulated_blocks(count=6000, length=5, temperature=1.0, offset=0.0, seed=0):
    """Tokens survive with the very probability σ(logit); the confidence says σ((logit - offset) / temperature)."""
    rng = random.Random(seed)
    blocks = []
    for _ in range(count):
        logits = [rng.gauss(0.8, 1.2) for _ in range(length)]
        accepted = next((k for k, x in enumerate(logits) if rng.random() > 1 / (1 + math.exp(-x))), length)
        blocks.append(Block([1 / (1 + math.exp((offset - x) / temperature)) for x in logits], length, accepted))
    return blocks


def test_calibration_error_by_hand():
    promised = np.array([0.1, 0.12, 0.9, 0.95])
    kept = np.array([0.0, 1.0, 1.0, 1.0])
    # bins of a half: |0.22 − 1| and |1.85 − 2|, over four
    assert expected_calibration_error(promised, kept, bins=2) == pytest.approx((0.78 + 0.15) / 4)
    assert expected_calibration_error(np.array([1.0]), np.array([1.0])) == 0
    assert math.isnan(expected_calibration_error(np.array([]), np.array([])))


def test_the_error_by_chance_is_that_of_right_promises_and_falls_with_their_number():
    promised = np.random.default_rng(1).random(20_000)
    dice = np.random.default_rng(2)
    found = [expected_calibration_error(promised[:500], dice.random(500) < promised[:500]) for _ in range(200)]
    assert error_by_chance(promised[:500]) == pytest.approx(np.mean(found), rel=0.05)
    assert error_by_chance(promised[:500]) > 2.5 * error_by_chance(promised[:5000]) > 4.5 * error_by_chance(promised)
    assert error_by_chance(np.ones(10)) == 0


def test_honest_confidences_are_found_honest():
    rows = reliability(simulated_blocks(), 5)
    assert [row["position"] for row in rows] == [1, 2, 3, 4, 5]
    for row in rows:
        assert row["ece"] < 1.7 * row["ece_by_chance"] < 0.03
        assert abs(row["promised"] - row["survival"]) < 0.03
        assert 0.65 < row["auc"] < 0.95 and 0 < row["brier"] < 0.25
    survivals = [row["survival"] for row in rows]
    assert survivals == sorted(survivals, reverse=True)
    assert rows[2]["conditional"] == pytest.approx(survivals[2] / survivals[1])


def test_positions_that_nothing_reached():
    blocks = [Block([0.9, 0.4], 2, 0), Block([0.8], 1, 0)]
    first, second, third = reliability(blocks, 3)
    assert (first["blocks"], second["blocks"], third["blocks"]) == (2, 1, 0)
    assert first["conditional"] == 0 and first["auc"] is None
    assert second["conditional"] is None and third["conditional"] is None


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_temperatures_undo_a_distortion(temperature):
    """Whoever divided by T too many finds 1/T."""
    drafter = tiny_drafter(tiny_target())
    found = fit_calibration(simulated_blocks(temperature=temperature), drafter, "simulated", offsets=False)
    assert found.num_samples == 6000 and found.dataset == "simulated" and found.offsets is None
    for fitted in found.temperatures:
        assert fitted == pytest.approx(1 / temperature, rel=0.3)
    assert sum(found.ece_after) <= sum(found.ece_before)
    if temperature != 1:
        assert max(found.ece_after) < 0.03 < max(found.ece_before)


@pytest.mark.parametrize(("temperature", "offset"), [(1.0, 0.0), (0.5, 0.7), (2.0, -1.0)])
def test_offsets_undo_a_shift(temperature, offset):
    drafter = tiny_drafter(tiny_target())
    found = fit_calibration(simulated_blocks(temperature=temperature, offset=offset), drafter)
    assert found.temperatures == pytest.approx([1 / temperature] * 5, rel=0.25)
    assert found.offsets == pytest.approx([offset] * 5, abs=0.3)
    assert max(found.ece_after) < 0.02


def test_greedy_drafts_are_judged_by_their_own_probability_too():
    """Blocks whose fate hangs on log-odds and confidence alike: both weights are found, in their order."""
    rng, blocks = random.Random(3), []
    for _ in range(8000):
        logits = [rng.gauss(1.0, 1.0) for _ in range(5)]
        log_odds = [rng.gauss(0.0, 1.5) for _ in range(5)]
        survives = [1 / (1 + math.exp(-(0.5 * x + 1.5 * y + 1.0))) for x, y in zip(logits, log_odds, strict=True)]
        accepted = next((k for k, chance in enumerate(survives) if rng.random() > chance), 5)
        blocks.append(Block([1 / (1 + math.exp(-x)) for x in logits], 5, accepted, log_odds))
    target = tiny_target()
    drafter = tiny_drafter(target)
    found = fit_calibration(blocks, drafter)
    assert found.temperatures == pytest.approx([2.0] * 5, rel=0.3)
    assert found.log_odds_weights == pytest.approx([1.5] * 5, rel=0.25)
    assert found.offsets == pytest.approx([1.0] * 5, abs=0.35)
    assert max(found.ece_after) < 0.02 < min(found.ece_before)
    set_calibration(drafter, greedy=found)
    logits, log_odds = torch.tensor([0.3, 1.0]), torch.tensor([-0.2, -3.0])
    expected = logits / torch.tensor(found.temperatures[:2]) + torch.tensor(found.offsets[:2])
    expected += torch.tensor(found.log_odds_weights[:2]) * log_odds
    assert torch.allclose(drafter.calibrated(logits, greedy=True, log_odds=log_odds), expected.sigmoid())
    assert torch.equal(drafter.calibrated(logits), logits.sigmoid())  # sampling knows nothing of it
    with pytest.raises(ValueError, match="pass `log_odds`"):
        drafter.calibrated(logits, greedy=True)
    with pytest.raises(ValueError, match="for greedy decoding"):
        set_calibration(drafter, sampled=found)
    sampled_blocks = [Block(block.confidence, block.drafted, block.accepted) for block in blocks]
    assert fit_calibration(sampled_blocks, tiny_drafter(target)).log_odds_weights is None


DRAFTERS = [{}, {"draft_token_ids": [*range(4, 30), 35, 40]}, {"markov_rank": 0}]


@pytest.mark.parametrize("config", DRAFTERS)
def test_confidences_weigh_log_odds(config):
    target = tiny_target()
    drafter = tiny_drafter(target, **config)
    inputs = encode_prompts(tiny_tokenizer(), PROMPTS)
    rounds = {}
    for weights in (None, [0.7] * 5):
        drafter.config.greedy_confidence_log_odds_weights = weights
        heard = rounds[weights is None] = []
        drafter.scheduling, drafter.on_round = "full", heard.append
        target.generate(**inputs, **OPTIONS, do_sample=False, repetition_penalty=1.1, assistant_model=drafter)
    drafted = [(raw, new) for raw, new in zip(rounds[True], rounds[False], strict=True) if any(raw.drafted)]
    assert drafted
    for raw, new in drafted:
        assert raw.drafted == new.drafted and raw.log_odds == new.log_odds
        for place, log_odds in enumerate(raw.log_odds):
            count = len(raw.drafted[place])
            assert len(log_odds) == count and len(set(log_odds)) == count
            logits = torch.tensor(raw.confidence[place][:count]).logit() + 0.7 * torch.tensor(log_odds)
            assert new.confidence[place][:count] == pytest.approx(logits.sigmoid().tolist(), abs=1e-4)


@pytest.mark.parametrize("mode", ["threshold", "early_stop", "two_step", "presampled", None])
@pytest.mark.parametrize("config", DRAFTERS)
def test_every_mode_schedules_by_such_confidences(mode, config):
    target = tiny_target()
    drafter = tiny_drafter(target, **config)
    inputs, lengths = encode_prompts(tiny_tokenizer(), PROMPTS), {}
    plain = target.generate(**inputs, **OPTIONS, do_sample=False)
    drafter.load_profile, drafter.scheduling = jagged_profile(), mode
    for weight in (-50.0, 50.0):  # it is sure of what it finds unlikely, and of what it finds likely
        drafter.config.greedy_confidence_log_odds_weights = [weight] * 5
        ids = target.generate(**inputs, **OPTIONS, do_sample=False, assistant_model=drafter)
        assert torch.equal(ids, plain)
        lengths[weight] = drafter.statistics.scheduled / drafter.statistics.drafts
    assert lengths[50.0] != lengths[-50.0]


def test_a_listener_hears_no_log_odds_in_sampling():
    target = tiny_target()
    drafter, heard = tiny_drafter(target), []
    drafter.on_round = heard.append
    target.generate(**encode_prompts(tiny_tokenizer(), PROMPTS), **OPTIONS, do_sample=True, assistant_model=drafter)
    assert any(any(one.drafted) for one in heard) and all(one.log_odds is None for one in heard)


def test_a_few_blocks_do_not_run_off():
    drafter = tiny_drafter(tiny_target())
    found = fit_calibration([Block([0.9, 0.8], 2, 2)] * 3, drafter)
    assert all(0.1 <= temperature <= 10 for temperature in found.temperatures)
    assert all(0 < offset < 5 for offset in found.offsets) and len(found.offsets) == 5


def test_calibration_of_each_way_of_decoding():
    target = tiny_target()
    drafter = tiny_drafter(target)
    logits = torch.tensor([[-1.0, 0.0, 2.0]])
    assert torch.equal(drafter.calibrated(logits, greedy=True), logits.sigmoid())
    sampled = Calibration([2.0] * 5, "", 1, [], [], [0.5] * 5)
    set_calibration(drafter, sampled=sampled)
    for greedy in (True, False):
        assert torch.allclose(drafter.calibrated(logits, greedy), (logits / 2 + 0.5).sigmoid())
    set_calibration(drafter, sampled=sampled, greedy=Calibration([1.0] * 5, "", 1, [], [], [-1.0] * 5))
    assert torch.allclose(drafter.calibrated(logits, greedy=True), (logits - 1).sigmoid())
    assert torch.allclose(drafter.calibrated(logits), (logits / 2 + 0.5).sigmoid())
    # And the loop reads the right one: the same drafts, promised less.
    promised = {}
    for greedy in (True, False):
        (block, *_) = roll_out(target, tiny_tokenizer(), drafter, PROMPTS[:1], do_sample=not greedy, **OPTIONS)
        promised[greedy] = block.confidence[0]
    assert promised[True] < promised[False]


def test_nothing_to_calibrate():
    drafter = tiny_drafter(tiny_target())
    with pytest.raises(ValueError, match="no draft was recorded"):
        fit_calibration([], drafter)
    set_calibration(drafter, greedy=Calibration([2.0] * 5, "", 1, [], []))
    with pytest.raises(ValueError, match="calibrated already"):
        fit_calibration(simulated_blocks(10), drafter)
    bare = tiny_drafter(tiny_target(), enable_confidence_head=False)
    with pytest.raises(ValueError, match="no confidence head"):
        fit_calibration(simulated_blocks(10), bare)


def test_calibration_goes_to_a_file_and_back(tmp_path):
    calibration = Calibration([1.5, 0.75], "held-out", 12, [0.1, 0.2], [0.01, 0.02])
    calibration.save(tmp_path / "sts.json")
    assert Calibration.load(tmp_path / "sts.json") == calibration
    assert set(json.loads((tmp_path / "sts.json").read_text())) == {
        "temperatures", "dataset", "num_samples", "ece_before", "ece_after",
    }  # fmt: skip
    with pytest.raises(ValueError, match="temperatures alone"):
        Calibration([1.5], "", 1, [], [], offsets=[0.1]).save(tmp_path / "sts.json")
    assert Calibration.load(tmp_path / "sts.json") == calibration


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        "{}",
        '{"temperatures": []}',
        '{"temperatures": [1, 0]}',
        '{"temperatures": ["1"]}',
        '{"temperatures": [1], "num_samples": null}',
    ],
)
def test_bad_calibration_files_are_refused(content, tmp_path):
    (tmp_path / "sts.json").write_text(content)
    with pytest.raises(ValueError, match=r"sts\.json: expected a JSON object with \"temperatures\""):
        Calibration.load(tmp_path / "sts.json")


def test_thresholds_by_hand():
    blocks = [Block([0.9, 0.6, 0.8], 3, 2), Block([0.3, 0.9], 2, 1), Block([], 5, 5)]
    low, middle, high = threshold_sweep(blocks, (0.0, 0.5, 0.95))
    assert low == {"threshold": 0.0, "verified": 2.5, "accepted": 1.5, "acceptance": 0.6, "tau": 2.5}
    assert middle == {"threshold": 0.5, "verified": 1.5, "accepted": 1.0, "acceptance": 2 / 3, "tau": 2.0}
    assert high == {"threshold": 0.95, "verified": 0.0, "accepted": 0.0, "acceptance": None, "tau": 1.0}
    assert threshold_sweep([Block([], 5, 5)]) == []


def test_a_set_may_not_have_the_name_of_the_total():
    target = tiny_target()
    with pytest.raises(ValueError, match="results over all prompts go by the name 'all'"):
        next(evaluate(target, tiny_tokenizer(), tiny_drafter(target), {"all": ["one"], "other": ["two"]}))


@pytest.mark.parametrize("head", [True, False])
def test_evaluation_of_real_rollouts(head, tmp_path):
    target = tiny_target()
    drafter = tiny_drafter(target, enable_confidence_head=head)
    sets = {"one": PROMPTS[:2], "two": PROMPTS[2:]}
    settings = {"T=0": {"do_sample": False, **OPTIONS}, "T=1": {"do_sample": True, **OPTIONS}}
    settings = {name: {k: v for k, v in options.items() if k != "max_new_tokens"} for name, options in settings.items()}
    rows = list(evaluate(target, tiny_tokenizer(), drafter, sets, settings=settings, max_new_tokens=30))
    assert [(row["setting"], row["prompts"]) for row in rows] == [
        (setting, name) for setting in ("T=0", "T=1") for name in ("one", "two", "all")
    ]
    assert drafter.scheduling is None and drafter.on_round is None
    for row in rows:
        assert row["tau"] > 1 and len(row["reliability"]) == 5
        first = row["reliability"][0]
        assert first["conditional"] > 0.05
        assert (first["blocks"] > 0) == bool(row["thresholds"]) == head
    assert sum(rows[0]["match"].values()) == 2 and "differs" not in rows[0]["match"]
    assert json.loads(json.dumps(rows))[0]["prompts"] == "one"
    names = [path.name for path in draw_evaluation(rows, tmp_path / "pictures")]
    assert names == (["acceptance.png", "thresholds.png", "reliability.png"] if head else ["acceptance.png"])
    assert all((tmp_path / "pictures" / name).stat().st_size > 5000 for name in names)


def test_recorded_blocks_are_those_of_the_statistics():
    target = tiny_target()
    drafter = tiny_drafter(target)
    drafter.scheduling = "threshold"
    blocks = roll_out(target, tiny_tokenizer(), drafter, PROMPTS[:1], do_sample=False, **OPTIONS)
    counts = drafter.statistics
    assert sum(block.drafted for block in blocks) == counts.scheduled == counts.drafted
    assert sum(block.accepted for block in blocks) == counts.accepted
    for position in range(5):
        assert sum(block.accepted > position for block in blocks) == counts.accepted_per_position[position]
    assert drafter.scheduling == "threshold"
    with pytest.raises(RuntimeError), recorded_blocks(drafter):
        raise RuntimeError
    assert drafter.scheduling == "threshold" and drafter.on_round is None


def test_nothing_counts_behind_a_stop():
    """Two tokens of a draft of four get out before the end; the target would have agreed with three."""
    drafter = tiny_drafter(tiny_target())
    with recorded_blocks(drafter) as blocks:
        drafter.on_round(Round([0], [[7, 8, 9, 10]], [3], [[7, 8]], [[0.9, 0.8, 0.7, 0.6]]))
        drafter.on_round(Round([0], [[7, 8, 9]], [1], [[7, 5]], [[0.9, 0.8, 0.7]]))
    assert blocks == [Block([0.9, 0.8], 2, 2), Block([0.9, 0.8, 0.7], 3, 1)]


def test_a_calibration_has_a_value_for_each_position():
    drafter = tiny_drafter(tiny_target())
    with pytest.raises(ValueError, match="needs 5 temperatures, got 3"):
        set_calibration(drafter, Calibration([1.0, 2.0, 3.0], "", 1, [], []))
    assert not drafter.config.is_calibrated


def test_prompt_sets(tmp_path):
    (tmp_path / "b.jsonl").write_text('{"prompt": "one"}\n{"prompt": "two"}\n')
    (tmp_path / "a.jsonl").write_text('{"messages": [{"role": "user", "content": "three"}]}\n')
    sets = read_prompt_sets([tmp_path], count=1)
    assert list(sets) == ["a", "b"]
    assert sets["a"] == [[{"role": "user", "content": "three"}]] and sets["b"] == [[{"role": "user", "content": "one"}]]
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"no \.jsonl file in this folder"):
        read_prompt_sets([tmp_path / "empty"])
    (tmp_path / "nothing.jsonl").write_text("\n")
    with pytest.raises(ValueError, match=r"nothing\.jsonl is empty"):
        read_prompt_sets([tmp_path])
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "a.jsonl").write_text('{"prompt": "four"}\n')
    with pytest.raises(ValueError, match=r"a\.jsonl: there is a file a\.jsonl before it"):
        read_prompt_sets([tmp_path / "a.jsonl", tmp_path / "other"])
