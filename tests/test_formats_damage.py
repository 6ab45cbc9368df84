"""Random damage to foreign packagings: each loads, or is refused in our own words, and claims allocate nothing."""

import json
import random
import resource
import shutil

import pytest
from packagings import is_refused, make_drafter, make_target, write_dflash, write_modelopt, write_specforge, write_speculators
from tiny import one_thread  # noqa: F401

from hf_dspark import DSparkDraftModel

JUNK = (
    None, True, False, -1, 0, 1, 3, 2**31, 2**70, 1e400, 0.5, "", "x", "64", [], [[]], [0, "a"], [1, 2, 3], {}, {"a": {}},
    {"rope_type": 3}, [{}], [{"speculative_tokens": "7"}], {"proposal_methods": [3]},
)  # fmt: skip


def mutate_config(path, chance: random.Random) -> None:
    """One value, at the top level or one below, becomes junk, or disappears."""
    content = json.loads(path.read_text())
    place = content
    nested = sorted(name for name, value in content.items() if isinstance(value, dict) and value)
    if nested and chance.random() < 0.5:
        place = content[chance.choice(nested)]
    name = chance.choice(sorted(place))
    if chance.random() < 0.2:
        del place[name]
    else:
        place[name] = chance.choice(JUNK)
    path.write_text(json.dumps(content))


def mutate_header(path, chance: random.Random) -> None:
    """A tensor gets another name, dtype or shape, with or without the data that this claims; or bytes are lost."""
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header, body = json.loads(data[8 : 8 + length]), data[8 + length :]
    name = chance.choice(sorted(header.keys() - {"__metadata__"}))
    kind = chance.randrange(5)
    if kind == 0:
        header[chance.choice(("d2t", "mtp.0.fc.weight", "", "layers.7.norm.weight", "embed_tokens.weight"))] = header.pop(name)
    elif kind == 1:
        header[name]["dtype"] = chance.choice(("F16", "I64", "BOOL", "F8_E4M3", "Q4"))
    elif kind == 2:
        header[name]["shape"] = chance.choice(([], [0], [2**40], [2**62, 2**62], [-1, 4], header[name]["shape"][::-1]))
    elif kind == 3:
        header[name]["data_offsets"] = chance.choice(([0, 2**50], [8, 4], [0, 0], ["a", 1]))
    else:
        body = body[: chance.randrange(len(body))]
    encoded = json.dumps(header).encode()
    path.write_bytes(len(encoded).to_bytes(8, "little") + encoded + body)


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    path, target = tmp_path_factory.mktemp("sources"), make_target()
    return [
        write_speculators(path / "full", make_drafter(), target),
        write_speculators(path / "reduced", make_drafter(draft_vocab_size=20, sample_from_anchor=False), target),
        write_specforge(path / "specforge", make_drafter()),
        write_modelopt(path / "modelopt", make_drafter()),
        write_dflash(path / "dflash", make_drafter(markov_rank=0, enable_confidence_head=False, sample_from_anchor=False)),
    ]


def test_damage_raises_nothing_but_checkpoint_errors(sources, tmp_path):
    for source in sources:
        DSparkDraftModel.from_pretrained(source)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # KB
    chance = random.Random(1)
    refused = 0
    for number in range(150):
        damaged = tmp_path / "damaged"
        shutil.copytree(sources[number % len(sources)], damaged)
        if number % 2:
            mutate_config(damaged / "config.json", chance)
        else:
            mutate_header(damaged / "model.safetensors", chance)
        refused += is_refused(damaged)
    assert 75 < refused < 150  # neither was everything refused nor nothing
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200 * 1024
