"""The measured curve: look-up, load, files in three forms, and refusals that say what to do."""

from __future__ import annotations

import json
import random
import time
from itertools import pairwise

import numpy as np
import pytest
import torch
from tiny import tiny_drafter, tiny_target
from transformers import LlamaConfig, LlamaForCausalLM

from hf_dspark.load_profile import LoadProfile

JAGGED = {1: 1 / 0.053, 2: 1 / 0.091, 3: 1 / 0.115, 4: 1 / 0.102, 5: 1 / 0.089, 8: 1 / 0.091, 64: 1 / 0.208}


def line(points: list[tuple[float, float]], x: float) -> float:
    """Straight lines through the points, level below the first, the last line going on (never down) above."""
    if x <= points[0][0] or len(points) == 1:
        return points[0][1]
    for (x0, y0), (x1, y1) in pairwise(points):
        if x <= x1:
            return y0 + (y1 - y0) * (x - x0) / (x1 - x0)
    return y1 + max(0.0, (y1 - y0) / (x1 - x0)) * (x - x1)


def level(points: list[tuple[float, float]], x: float) -> float:
    return line(points, min(x, points[-1][0]))


# Look-up


def test_measured_points_are_kept_as_they_are_however_jagged():
    profile = LoadProfile(JAGGED)
    for size, rate in JAGGED.items():
        assert profile.step_seconds(size) == 1 / rate
    assert profile.step_seconds(3) > profile.step_seconds(4) > profile.step_seconds(5)


def test_seconds_are_interpolated_and_not_rates():
    profile = LoadProfile({4: 10.0, 2: 20.0})  # 0.05 s and 0.1 s; any order
    assert list(profile.steps_per_second) == [2, 4]
    assert profile.step_seconds(3) == pytest.approx(0.075, rel=1e-12)
    assert profile.step_seconds(1) == 0.05
    assert profile.step_seconds(6) == pytest.approx(0.15, rel=1e-12)


def test_look_up_agrees_with_plain_interpolation_on_random_curves():
    dice = random.Random(0)
    for _ in range(20):
        sizes = sorted(dice.sample(range(1, 60), dice.randint(1, 8)))
        points = [(size, dice.uniform(0.01, 0.2)) for size in sizes]
        profile = LoadProfile({size: 1 / seconds for size, seconds in points})
        tokens = torch.arange(1, 91).reshape(9, 10).T  # (10, 9), not contiguous
        seconds = profile.step_seconds(tokens)
        assert seconds.shape == (10, 9) and seconds.dtype == torch.float64
        for batch_tokens, value in zip(range(1, 91), seconds.T.flatten().tolist(), strict=True):
            expected = pytest.approx(line(points, batch_tokens), rel=1e-9)
            assert profile.step_seconds(batch_tokens) == expected
            assert value == expected


def test_a_last_segment_that_falls_stays_level_behind_the_last_point():
    profile = LoadProfile({1: 5.0, 2: 10.0})
    assert profile.step_seconds(1000) == 0.1


def test_floor_is_a_staircase():
    profile = LoadProfile({2: 20.0, 8: 10.0}, interpolation="floor")
    assert profile.step_seconds(torch.tensor([1, 2, 7, 8, 999])).tolist() == [0.05, 0.05, 0.05, 0.1, 0.1]


def test_an_integer_gives_a_float():
    assert type(LoadProfile(JAGGED).step_seconds(7)) is float


def test_request_seconds_are_added_by_the_number_of_requests():
    profile = LoadProfile({1: 10.0}, request_seconds={30: 0.02, 10: 0.01})
    assert profile.step_seconds(5) == pytest.approx(0.11)  # level below the first count; the load is 1
    assert profile.with_load(20).step_seconds(5) == pytest.approx(0.115)
    assert profile.with_load(20).step_seconds(5, requests=500) == pytest.approx(0.12)
    assert profile.step_seconds(torch.tensor([5, 6]), requests=20).tolist() == pytest.approx([0.115, 0.115])


# Load


def test_a_callable_load_is_asked_every_time():
    load = iter([3, 5])
    profile = LoadProfile(JAGGED).with_load(lambda: next(load))
    assert [profile.requests(), profile.requests()] == [3, 5]


def test_with_load_leaves_the_profile_unchanged():
    profile = LoadProfile(JAGGED, draft_seconds=0.5, interpolation="floor", request_seconds={1: 0.1})
    busy = profile.with_load(64)
    assert (profile.requests(), busy.requests()) == (1, 64)
    assert busy != profile and busy.with_load(1) == profile


@pytest.mark.parametrize("rates", [{4: 3.0}, {1: 3.0, 9: 3.0}])
def test_flat(rates):
    assert LoadProfile(rates).is_flat
    assert not LoadProfile(rates | {16: 2.9}).is_flat


# Refusals


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"steps_per_second": {}}, r"`steps_per_second` must hold a point, got \{\}\. Use LoadProfile.measure"),
        ({"steps_per_second": [1.0]}, r"`steps_per_second` must be a dict .* got \[1\.0\]\. Write"),
        (
            {"steps_per_second": {1: 0.0}},
            r"`steps_per_second\[1\]` must be a finite positive number, got 0\.0\. Measure",
        ),
        ({"steps_per_second": {1: -2}}, r"`steps_per_second\[1\]` must be a finite positive number, got -2"),
        ({"steps_per_second": {1: 2.0, 4: float("inf")}}, r"`steps_per_second\[4\]` must be a finite .* got inf"),
        ({"steps_per_second": {1: float("nan")}}, r"`steps_per_second\[1\]` must be a finite .* got nan"),
        ({"steps_per_second": {1: "9"}}, r"`steps_per_second\[1\]` must be a finite .* got '9'"),
        ({"steps_per_second": {1: True}}, r"`steps_per_second\[1\]` must be a finite .* got True"),
        ({"steps_per_second": {1.5: 2.0}}, r"`steps_per_second` counts in integers of at least 1, got 1\.5\. Give"),
        ({"steps_per_second": {True: 2.0}}, r"`steps_per_second` counts in integers of at least 1, got True"),
        ({"steps_per_second": {0: 2.0}}, r"`steps_per_second` counts in integers of at least 1, got 0"),
        ({"draft_seconds": -0.1}, r"`draft_seconds` must be a finite non-negative number, got -0\.1"),
        ({"draft_seconds": float("nan")}, r"`draft_seconds` must be a finite non-negative number, got nan"),
        ({"concurrent_requests": 0}, r"`concurrent_requests` counts in integers of at least 1, got 0"),
        ({"concurrent_requests": 2.0}, r"`concurrent_requests` counts in integers of at least 1, got 2\.0"),
        ({"interpolation": "cubic"}, r"`interpolation` must be 'linear' or 'floor', got 'cubic'\. Name"),
        ({"request_seconds": None}, r"`request_seconds` must be a dict .* got None"),
        ({"request_seconds": {0: 1.0}}, r"`request_seconds` counts in integers of at least 1, got 0"),
        ({"request_seconds": {2: float("inf")}}, r"`request_seconds\[2\]` must be a finite number, got inf"),
        (
            {"request_seconds": {1: 0.0, 2: -0.5}},
            r"`request_seconds` must leave every step longer than 0 s, got -0\.5 s",
        ),
    ],
)
def test_bad_fields_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        LoadProfile(**({"steps_per_second": {1: 2.0}} | arguments))


def test_a_callable_that_returns_no_load_is_refused_when_asked():
    profile = LoadProfile(JAGGED, concurrent_requests=lambda: 0)
    with pytest.raises(ValueError, match=r"`concurrent_requests\(\)` counts in integers of at least 1, got 0"):
        profile.requests()
    with pytest.raises(ValueError, match=r"`concurrent_requests` counts in integers of at least 1, got -1"):
        profile.with_load(-1)


# Files


def test_save_and_load_give_the_same_profile(tmp_path):
    profile = LoadProfile(JAGGED, 0.0123, 7, "floor", {1: 0.0, 64: 0.002})
    path = tmp_path / "profile.json"
    path.write_text("an older file")
    profile.save(path)
    assert LoadProfile.load(path) == profile
    content = json.loads(path.read_text())
    assert (content["format"], content["version"]) == ("hf_dspark.load_profile", 1)
    assert [entry.name for entry in tmp_path.iterdir()] == ["profile.json"]


def test_numbers_of_numpy_are_taken_and_saved(tmp_path):
    profile = LoadProfile({np.int64(2): np.float32(4.0)}, np.float32(0.5), np.int64(3), request_seconds={np.int64(1): 0})
    profile.save(tmp_path / "profile.json")
    assert LoadProfile.load(tmp_path / "profile.json") == profile == LoadProfile({2: 4.0}, 0.5, 3, "linear", {1: 0.0})


def test_optional_fields_may_be_missing_in_a_file(tmp_path):
    path = tmp_path / "profile.json"
    path.write_text(json.dumps({"format": "hf_dspark.load_profile", "version": 1, "steps_per_second": {"2": 4.0}}))
    assert LoadProfile.load(path) == LoadProfile({2: 4.0})


def test_a_callable_load_is_saved_as_its_present_number(tmp_path):
    LoadProfile(JAGGED, concurrent_requests=lambda: 9).save(tmp_path / "profile.json")
    assert LoadProfile.load(tmp_path / "profile.json") == LoadProfile(JAGGED, concurrent_requests=9)


@pytest.mark.parametrize("step", ["load", "dumps", "write", "replace"])
def test_a_failed_save_leaves_the_old_file_and_no_other(tmp_path, monkeypatch, step):
    def fail(*args, **kwargs):
        if step == "write":  # the disk fills up half-way
            with open(args[0], "w") as file:
                file.write("{")
        raise OSError("no space left")

    path = tmp_path / "profile.json"
    LoadProfile({1: 1.0}).save(path)
    before = path.read_bytes()
    profile = LoadProfile(JAGGED, concurrent_requests=fail if step == "load" else 1)
    if step != "load":
        monkeypatch.setattr({"dumps": "json.dumps", "write": "pathlib.Path.write_text", "replace": "os.replace"}[step], fail)
    with pytest.raises(OSError, match="no space left"):
        profile.save(path)
    assert path.read_bytes() == before
    assert [entry.name for entry in tmp_path.iterdir()] == ["profile.json"]


def test_sglang_table_is_a_floor_look_up(tmp_path):
    path = tmp_path / "sps.json"
    table = {"sample_batch_tokens": [8, 16, 32], "sample_steps_per_sec": [100.0, 95.0, 50.0], "max_batch_tokens": 128}
    path.write_text(json.dumps(table))
    profile = LoadProfile.load(path)
    expected = {1: 100.0, 8: 100.0, 15: 100.0, 16: 95.0, 31: 95.0, 32: 50.0, 10_000: 50.0}
    for batch_tokens, rate in expected.items():
        assert profile.step_seconds(batch_tokens) == 1 / rate
    profile.save(path)  # and stays one in our own form
    assert LoadProfile.load(path) == profile


@pytest.mark.parametrize(
    ("m_probes", "theta_seconds"),
    [
        ([1, 200], [0.0, 0.02]),
        ([0, 64, 128], [0.0, -0.002, 0.03]),  # fitted by bins: the first centre may be 0, a value below it
        ([0, 1, 4], [0.0, 0.01, 0.02]),
        ([0], [0.003]),
        ([5], [0.003]),
    ],
)
def test_sglang_fit_is_a_sum_of_two_lines(tmp_path, m_probes, theta_seconds):
    path = tmp_path / "sps.json"
    fit = {"bias_seconds": 0.01, "bs_probes": [2, 100], "alpha_seconds": [-0.001, 0.05]}
    path.write_text(json.dumps(fit | {"m_probes": m_probes, "theta_seconds": theta_seconds}))
    profile = LoadProfile.load(path)
    alpha, theta = list(zip([2, 100], [-0.001, 0.05], strict=True)), list(zip(m_probes, theta_seconds, strict=True))
    for requests in (1, 2, 30, 100, 400):
        tokens = torch.tensor([1, 2, 3, 4, 5, 6, 63, 64, 65, 127, 128, 129, 200, 201, 5000])
        expected = [0.01 + level(alpha, requests) + level(theta, m) for m in tokens.tolist()]
        assert profile.with_load(requests).step_seconds(tokens).tolist() == pytest.approx(expected, rel=1e-9)
    profile.save(path)
    assert LoadProfile.load(path) == profile


FIT = {"bias_seconds": 0.1, "bs_probes": [1], "alpha_seconds": [0], "m_probes": [1], "theta_seconds": [0]}
OWN = {"format": "hf_dspark.load_profile", "version": 1, "steps_per_second": {"1": 2.0}}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", r"profile\.json must hold JSON, got other content .*\. Save the profile again"),
        (b"\xff\xfe{", r"profile\.json must hold JSON, got other content"),
        (
            [1],
            r"profile\.json holds .* SGLang's SPS files was expected, got list\. Write the file with LoadProfile\.save",
        ),
        ({"rates": []}, r"a saved LoadProfile or one of SGLang's SPS files was expected, got \['rates'\]"),
        (OWN | {"version": 2}, r"`version` must be .*1\), got \('hf_dspark.load_profile', 2\)\. Measure"),
        (OWN | {"format": "other"}, r"`format`, `version` must be .* got \('other', 1\)"),
        ({"format": "hf_dspark.load_profile", "version": 1}, r"missing 1 required .* 'steps_per_second'"),
        (OWN | {"colour": "red"}, r"unexpected keyword argument 'colour'"),
        (OWN | {"steps_per_second": {"one": 2.0}}, r"`steps_per_second` counts in integers of at least 1, got 'one'"),
        (OWN | {"steps_per_second": [2.0]}, r"`steps_per_second` must be a dict .* got \[2\.0\]"),
        (OWN | {"concurrent_requests": 0}, r"`concurrent_requests` counts in integers of at least 1, got 0"),
        (
            {"sample_batch_tokens": [1, 2], "sample_steps_per_sec": [1.0]},
            r"`sample_batch_tokens` and `sample_steps_per_sec` must be lists of one length",
        ),
        (
            {"sample_batch_tokens": [2, 1], "sample_steps_per_sec": [1.0, 1.0]},
            r"`sample_batch_tokens` must rise strictly",
        ),
        (
            {"sample_batch_tokens": [1, 1], "sample_steps_per_sec": [1.0, 1.0]},
            r"`sample_batch_tokens` must rise strictly",
        ),
        ({"sample_batch_tokens": [], "sample_steps_per_sec": []}, r"must be lists of one length, got \[\]"),
        (
            {"sample_batch_tokens": [0], "sample_steps_per_sec": [1.0]},
            r"`sample_batch_tokens` counts .* at least 1, got 0",
        ),
        (
            {"sample_batch_tokens": [1], "sample_steps_per_sec": [0.0]},
            r"`steps_per_second\[1\]` must be a finite positive",
        ),
        (FIT | {"m_probes": [-1]}, r"`m_probes` counts in integers of at least 0, got -1"),
        (FIT | {"bs_probes": [0]}, r"`bs_probes` counts in integers of at least 1, got 0"),
        (FIT | {"theta_seconds": [None]}, r"`theta_seconds\[1\]` must be a finite number, got None"),
        (
            FIT | {"theta_seconds": [-0.1]},
            r"`bias_seconds \+ theta_seconds\(1\)` must be a finite positive number, got 0",
        ),
        (FIT | {"bias_seconds": "x"}, r"`bias_seconds` must be a finite number, got 'x'"),
        (FIT | {"alpha_seconds": [-1]}, r"`request_seconds` must leave every step longer than 0 s"),
    ],
)
def test_bad_files_are_refused(tmp_path, content, message):
    path = tmp_path / "profile.json"
    path.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    with pytest.raises(ValueError, match=message):
        LoadProfile.load(path)


# Measuring


@pytest.fixture(scope="module")
def target():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=97,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=64,
    )
    return LlamaForCausalLM(config).eval()


def test_measure_times_cached_forwards_of_every_size_in_turn(target):
    forwards = []

    def record(module, args, kwargs, output):
        assert not torch.is_grad_enabled()
        forwards.append((kwargs["cache"].get_seq_length(), kwargs["input_ids"], output.logits))

    hook = target.register_forward_hook(record, with_kwargs=True)
    try:
        profile = LoadProfile.measure(target, context_length=20, batch_tokens=(5, 1, 3), repeats=3)
    finally:
        hook.remove()
    assert list(profile.steps_per_second) == [1, 3, 5]
    assert all(rate > 0 for rate in profile.steps_per_second.values())
    assert (profile.draft_seconds, profile.requests(), profile.interpolation) == (0.0, 1, "linear")

    (start, context, _), *timed = forwards
    assert (start, context.shape) == (0, (1, 20))
    assert {start for start, _, _ in timed} == {20}
    sizes = [ids.shape[1] for _, ids, _ in timed]
    assert sizes == [1, 3, 5, 3, 5, 1, 5, 1, 3, 1, 3, 5]  # a warm-up and three passes, every pass in another order
    with torch.no_grad():  # the cached context is really there, and no earlier forward's tokens are
        for _, ids, logits in timed:
            expected = target(torch.cat([context, ids], dim=1)).logits[:, 20:]
            torch.testing.assert_close(logits, expected)


def test_measure_counts_the_median_and_discards_the_first_pass(target, monkeypatch):
    spent = {1: [9.0, 1.0, 2.0, 7.0], 2: [9.0, 5.0, 4.0, 6.0]}
    order = [1, 2, 2, 1, 1, 2, 2, 1]
    ticks, clock, seen = [], 0.0, {1: 0, 2: 0}
    for size in order:
        ticks += [clock, clock + spent[size][seen[size]]]
        clock, seen[size] = clock + 100.0, seen[size] + 1
    reading = iter(ticks)
    monkeypatch.setattr("hf_dspark.load_profile._clock", lambda device: next(reading))
    profile = LoadProfile.measure(target, context_length=4, batch_tokens=(1, 2), repeats=3)
    assert profile.steps_per_second == {1: 1 / 2.0, 2: 1 / 5.0}


def test_the_draft_that_takes_in_the_prompt_does_not_count(monkeypatch):
    target = tiny_target("llama")
    drafter = tiny_drafter(target)
    project, taken_in = drafter.project_context, []

    def slow_on_prompts(states):
        taken_in.append(states.shape[1])
        time.sleep(1.0 if states.shape[1] >= 20 else 0.0)
        return project(states)

    monkeypatch.setattr(drafter, "project_context", slow_on_prompts)
    profile = LoadProfile.measure(target, drafter, context_length=20, batch_tokens=(1, 2), repeats=1)
    assert max(taken_in) == 20
    assert 0 < profile.draft_seconds < 0.5
    assert drafter.on_round is None and drafter.scheduling is None


def test_measure_shortens_the_context_to_what_the_target_can_hold(target):
    lengths = []
    hook = target.register_forward_pre_hook(
        lambda module, args, kwargs: lengths.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    try:
        LoadProfile.measure(target, batch_tokens=(4, 16), repeats=1)
    finally:
        hook.remove()
    assert lengths == [48, 4, 16, 16, 4]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"batch_tokens": ()}, r"`batch_tokens` must name a size, got \(\)\. Leave it out"),
        ({"batch_tokens": (1, 0)}, r"`batch_tokens` counts in integers of at least 1, got 0"),
        ({"batch_tokens": (64,)}, r"`batch_tokens` must leave room .* max_position_embeddings=64\. Time smaller sizes"),
        ({"repeats": 0}, r"`repeats` counts in integers of at least 1, got 0"),
        ({"context_length": 0}, r"`context_length` counts in integers of at least 1, got 0"),
    ],
)
def test_measure_refuses_what_it_cannot_time(target, arguments, message):
    with pytest.raises(ValueError, match=message):
        LoadProfile.measure(target, **({"batch_tokens": (1,)} | arguments))
