"""Random damage to every packaging: each loads or is refused in our own words, claims allocate nothing, no code is run."""

import json
import random
import resource
import shutil

import torch
from packagings import PACKAGINGS, build
from tiny import one_thread  # noqa: F401
from torch.utils._python_dispatch import TorchDispatchMode

from hf_dspark import DSparkDraftModel
from hf_dspark.errors import CheckpointError

CASES, LIMIT = 500, 200 * 2**20
JUNK = (
    None, True, False, -1, 0, 1, 3, 2**31, 2**40, 2**70, 1e400, 0.5, "", "x", "64", [], [[]], [0, "a"], [1, 2, 3], {},
    {"a": {}}, {"rope_type": 3}, [{}], [{"speculative_tokens": "7"}], {"proposal_methods": [3]},
    {"full_attention": {"rope_theta": 2**70}},
    {"AutoConfig": "harmful.C", "AutoModel": "harmful.M"}, "harmful", {"quant_method": "harmful"},
)  # fmt: skip
CODE_KEYS = ("auto_map", "attn_implementation", "_attn_implementation", "quantization_config", "custom_generate")


def mutate_config(path, chance: random.Random) -> None:
    """One value, at the top level or one below, becomes junk, or disappears; or a key that names code is added."""
    content = json.loads(path.read_text())
    place = content
    nested = sorted(name for name, value in content.items() if isinstance(value, dict) and value)
    if nested and chance.random() < 0.5:
        place = content[chance.choice(nested)]
    name = chance.choice(sorted(place)) if chance.random() < 0.9 else chance.choice(CODE_KEYS)
    if name in place and chance.random() < 0.2:
        del place[name]
    else:
        place[name] = chance.choice(JUNK)
    path.write_text(json.dumps(content))


def mutate_header(path, chance: random.Random) -> None:
    """A tensor gets another name, dtype or shape, with or without the data that this claims; or bytes change or are lost."""
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header, body = json.loads(data[8 : 8 + length]), data[8 + length :]
    name = chance.choice(sorted(header.keys() - {"__metadata__"}))
    kind = chance.randrange(6)
    if kind == 0:
        header[chance.choice(("d2t", "mtp.0.fc.weight", "", "layers.7.norm.weight", "embed_tokens.weight"))] = header.pop(name)
    elif kind == 1:
        header[name]["dtype"] = chance.choice(("F16", "I64", "BOOL", "F8_E4M3", "Q4"))
    elif kind == 2:
        header[name]["shape"] = chance.choice(([], [0], [2**40], [2**62, 2**62], [-1, 4], header[name]["shape"][::-1]))
    elif kind == 3:
        header[name]["data_offsets"] = chance.choice(([0, 2**50], [8, 4], [0, 0], ["a", 1]))
    elif kind == 4:
        body = body[: chance.randrange(len(body))]
    encoded = bytearray(json.dumps(header).encode())
    size = len(encoded)
    if kind == 5:
        for _ in range(chance.choice((1, 1, 4))):
            encoded[chance.randrange(size)] = chance.randrange(256)
        size = chance.choice((size, size, size + 1, 2**40, 2**63))
    path.write_bytes(size.to_bytes(8, "little") + bytes(encoded) + body)


class LargestTensor(TorchDispatchMode):
    """Remembers the bytes of the largest tensor that any operation has made, touched or not."""

    size = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        for tensor in made if isinstance(made, (list, tuple)) else [made]:
            if isinstance(tensor, torch.Tensor) and not tensor.is_meta:
                self.size = max(self.size, tensor.untyped_storage().nbytes())
        return made


def test_damage_raises_nothing_but_checkpoint_errors(tmp_path):
    with LargestTensor() as largest:
        torch.empty(LIMIT, dtype=torch.uint8)
    assert largest.size == LIMIT  # it would be seen
    sources, witness = [build(packaging, tmp_path / packaging) for packaging in PACKAGINGS], tmp_path / "run"
    for source in sources:
        DSparkDraftModel.from_pretrained(source)
        for name in ("harmful", "modeling_harmful", "__init__"):
            (source / f"{name}.py").write_text(f"open({str(witness)!r}, 'w')\n")
    chance, damaged, refused = random.Random(1), tmp_path / "damaged", 0
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # KB
    for number in range(CASES):
        source = sources[number // 2 % len(sources)]
        shutil.copytree(source, damaged)
        if number % 2:
            mutate_config(damaged / "config.json", chance)
        else:
            mutate_header(damaged / "model.safetensors", chance)
        try:
            with LargestTensor() as largest:
                DSparkDraftModel.from_pretrained(damaged)
        except CheckpointError as error:
            message = str(error)
            assert message.startswith(f"{damaged}: ")
            # what no machine has fails before it can be counted
            assert "MemoryError" not in message and "allocate" not in message, f"case {number}: {message}"
            refused += 1
        assert largest.size < LIMIT, f"case {number}"
        shutil.rmtree(damaged)
    assert CASES / 2 < refused < CASES  # neither was everything refused nor nothing
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < LIMIT / 2**10
    assert not witness.exists()
