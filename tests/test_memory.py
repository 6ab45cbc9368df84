"""A drafter costs the memory of its own tensors: of the target's embedding and LM head there is never a second copy.

Measured in a process of its own, on a drafter whose file also holds both, by what it has of the machine at most.
"""

import ctypes
import gc
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from packagings import write_deepspec
from transformers import Qwen3Config, Qwen3ForCausalLM

from hf_dspark import DSparkConfig, DSparkDraftModel

VOCABULARY, WIDTH = 40_000, 256  # 39 MB each, of embedding and head


def resident(name: str) -> int:
    """Bytes of this process in memory: `VmRSS` now, `VmHWM` at most since the peak was last forgotten."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name)) * 1024


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    shape = dict(
        vocab_size=VOCABULARY, hidden_size=WIDTH, num_attention_heads=4, num_key_value_heads=2, head_dim=64,
        max_position_embeddings=256, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    target = Qwen3ForCausalLM(Qwen3Config(**shape, intermediate_size=256, num_hidden_layers=4)).eval()
    config = DSparkConfig(
        **shape, intermediate_size=4096, num_hidden_layers=5, block_size=7, mask_token_id=3, target_layer_ids=[0, 2],
        num_target_layers=4, markov_rank=256,
    )  # fmt: skip
    drafter = DSparkDraftModel(config)
    torch.nn.init.constant_(drafter.norm.weight, 1.1)  # not as new
    write_deepspec(folder / "d", drafter, target)
    prompt = torch.arange(5, 25)[None]
    plain = target.generate(prompt, max_new_tokens=12, do_sample=False)
    target.generate(prompt, assistant_model=drafter, max_new_tokens=12, do_sample=False)  # brings in the code
    del drafter
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)  # what was freed before must not be used again unseen
    Path("/proc/self/clear_refs").write_text("5")  # forgets the peak
    before = resident("VmRSS")
    drafter = DSparkDraftModel.from_pretrained(folder / "d")
    assert torch.equal(target.generate(prompt, assistant_model=drafter, max_new_tokens=12, do_sample=False), plain)
    assert drafter.statistics.drafted > 0
    own = sum(tensor.numel() * tensor.element_size() for tensor in drafter.state_dict().values())
    print((resident("VmHWM") - before) / own)


def test_loading_and_drafting_take_no_more_than_the_drafters_own_tensors(tmp_path):
    if not os.access("/proc/self/clear_refs", os.W_OK):
        pytest.skip("needs Linux, which counts a process's memory")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, __file__, str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert 0.9 < float(done.stdout) <= 1.15  # less would mean that nothing was seen


if __name__ == "__main__":
    main(Path(sys.argv[1]))
