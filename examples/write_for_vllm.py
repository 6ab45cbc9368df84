"""A drafter written in the packaging that vLLM serves, read back, and held against the original.

    python examples/write_for_vllm.py --output for-vllm
    python examples/write_for_vllm.py --target Qwen/Qwen3-4B --drafter my-drafter --output for-vllm

Afterwards `vllm serve for-vllm` starts target and drafter. No version of vLLM has been run with such files here: compare
the acceptance length that it reports with τ of `hf-dspark evaluate`.
"""

import argparse
from pathlib import Path

import torch

from hf_dspark import DSparkDraftModel
from hf_dspark.formats.export import export_checkpoint
from hf_dspark.loading import drafter_by_name, target_by_name

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--target", default="default", help="folder or repo id of a causal language model")
parser.add_argument("--drafter", default="default", help="folder or repo id of a drafter for it")
parser.add_argument("--output", type=Path, required=True, help="new folder")


def main(arguments: list[str] | None = None) -> None:
    args = parser.parse_args(arguments)
    target, _ = target_by_name(args.target)
    drafter = drafter_by_name(args.drafter)  # in the precision it has on disk
    export_checkpoint(drafter, args.output, "speculators", target)

    again = DSparkDraftModel.from_pretrained(args.output)
    weights = again.state_dict()
    assert weights.keys() == drafter.state_dict().keys()
    assert all(torch.equal(weights[name], tensor) for name, tensor in drafter.state_dict().items())
    print(f"{len(weights)} tensors written to {args.output} and read back the same.")
    print(f"vllm serve {args.output}")


if __name__ == "__main__":
    main()
