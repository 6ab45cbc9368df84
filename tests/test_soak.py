"""The soak of the serving loop, for a moment: it finds nothing, and it would."""

import importlib
from pathlib import Path

import pytest
from tiny import one_thread  # noqa: F401

from hf_dspark import ServingLoop


@pytest.fixture
def soak(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "benchmarks"))
    return importlib.import_module("soak")


def test_nothing_is_lost_or_mixed_up(soak):
    report = soak.run_soak(600, max_rows=4, prompts=40, seed=1, most_steps=130)
    assert report["problems"] == [] and report["still_open"] == 0
    assert sum(report["outcomes"].values()) == report["requests"] > 30
    assert report["outcomes"].keys() == {"stop", "length", "cancelled", "error"}
    assert report["verified"] > report["rejected"] > 0


def test_what_is_mixed_up_is_found(soak, monkeypatch):
    step = ServingLoop.step

    def swapping(self):
        events = step(self)
        going = [event for event in events if event.finished is None and event.tokens]
        if len(going) > 1:  # each client gets the other's tokens
            first, second = going[0].tokens[:], going[1].tokens[:]
            going[0].tokens[:], going[1].tokens[:] = second, first
        return events

    monkeypatch.setattr(ServingLoop, "step", swapping)
    assert soak.run_soak(600, max_rows=4, prompts=20, seed=1, most_steps=30)["problems"]
