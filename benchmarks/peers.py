"""DSpark against what transformers offers without it, on the embedded default, for one request and for several.

    python benchmarks/peers.py --prompts ../shared/prompts --count 4 --max-new-tokens 48 --packed \\
        --dflash my-dflash-drafter --random-prompts 4 --output benchmarks/results/peers.json
    python benchmarks/peers.py --prompts ../shared/prompts --count 8 --max-new-tokens 48 --packed --batch-sizes 8 \\
        --output benchmarks/results/peers_batch.json

Every call is made by all methods in turn, in an order that rotates: plain decoding; with `--compiled` compiled plain decoding
(a static cache, and weights frozen into the graph, which packs them); prompt lookup; with `--dflash` transformers' own DFlash,
from the folder of a drafter without heads and with the bonus anchor, in any packaging; DSpark with every token verified; and
DSpark with its scheduler. transformers has assisted generation for one row only, so several rows meet only plain decoding.

Quoted are seconds per token against plain decoding, tokens per row and forward of the target, and whether the texts agree.
`of_limit` is the share of a DSpark call behind its prefill that draft and target forwards take, so how much it reaches of what
they allow. The last line of stdout is JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from common import about, add_options, chosen_sets, save
from transformers import (
    BatchEncoding,
    CompileConfig,
    MuseGlimmerAssistantConfig,
    MuseGlimmerAssistantModel,
    PreTrainedModel,
    StaticCache,
)
from transformers.utils import logging

from hf_dspark import DSparkDraftModel, LoadProfile, pack_linears
from hf_dspark.demo import load_default, load_target
from hf_dspark.evaluation import SETTINGS, encode_prompts, match_texts, without_padding
from hf_dspark.evaluation.comparison import left_padded

_RANDOM_LENGTH = 48  # tokens of a random prompt


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser, count=5)
    parser.add_argument(
        "--batch-sizes", type=int, nargs="+", default=[1], help="rows per call; more than a set has are taken from all"
    )
    parser.add_argument("--settings", nargs="+", default=["T=0"], choices=list(SETTINGS))
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--random-prompts", type=int, default=0, help="prompts of random tokens, as a further set")
    parser.add_argument("--lookup-tokens", type=int, default=10, help="draft length of prompt lookup, its default")
    parser.add_argument("--dflash", help="folder with a DFlash drafter of the target")
    parser.add_argument("--compiled", action="store_true", help="compiled plain decoding as well; compiles for some minutes")
    parser.add_argument("--packed", action="store_true", help="pre-pack the linear layers of target and DFlash drafter first")
    arguments = parser.parse_args()

    logging.set_verbosity_error()
    target, tokenizer, drafter = load_default()
    peers = Peers(target, drafter, arguments)
    prompts = chosen_sets(arguments)
    if arguments.random_prompts:
        generator = torch.Generator().manual_seed(0)
        prompts["random tokens"] = list(
            torch.randint(target.config.vocab_size, (arguments.random_prompts, _RANDOM_LENGTH), generator=generator)
        )
    report: dict[str, Any] = {**about(), "packed": arguments.packed, "rows": []}
    for setting in arguments.settings:
        for batch_size in arguments.batch_sizes:
            for name, texts in _sets_for(prompts, batch_size):
                accounts: dict[str, Account] = {}
                for number, inputs in enumerate(_batches(tokenizer, texts, batch_size)):
                    peers.run(inputs, setting, number, accounts)
                    print(f"{setting}, {batch_size} rows, {name}: {number + 1}", file=sys.stderr, flush=True)
                for method, account in accounts.items():
                    row = {"setting": setting, "rows": batch_size, "prompts": name, "method": method}
                    row |= account.summary(accounts["plain"])
                    report["rows"].append(row)
                    print(
                        f"{setting} {batch_size:>2} rows {name:<13} {method:<20} ratio {row['ratio_total']:.2f} "
                        f"(median {row['ratio_median']:.2f}) tokens per forward {row['tokens_per_forward']:.2f} {row['match']}",
                        flush=True,
                    )
                save(report, arguments)
    print(json.dumps(report))


@dataclass
class Account:
    """What the calls of one method took and brought."""

    seconds: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    steps: int = 0  # of a row in a forward behind the prefill
    stepped: int = 0  # tokens that came of them
    matches: Counter[str] = field(default_factory=Counter)
    within: list[float] = field(default_factory=list)  # DSpark: seconds behind the prefill, and those of draft and target
    forwards: list[float] = field(default_factory=list)
    verified: int = 0
    rejected: int = 0

    def summary(self, plain: Account) -> dict[str, Any]:
        own, other = ([s / t for s, t in zip(a.seconds, a.tokens, strict=True)] for a in (self, plain))
        found = {
            "calls": len(self.seconds),
            "ratio_median": statistics.median(b / a for a, b in zip(own, other, strict=True)),
            "ratio_total": sum(self.tokens) / sum(self.seconds) * sum(plain.seconds) / sum(plain.tokens),
            "tokens_per_second": sum(self.tokens) / sum(self.seconds),
            "tokens_per_forward": self.stepped / max(1, self.steps),
            "match": dict(self.matches),
        }
        if self.within:
            found |= {"of_limit": sum(self.forwards) / sum(self.within), "verified": self.verified, "rejected": self.rejected}
        return found


class Peers:
    """All methods on one target."""

    def __init__(self, target: PreTrainedModel, drafter: DSparkDraftModel, arguments: argparse.Namespace):
        self.target, self.drafter, self.arguments = target, drafter, arguments
        self.dflash = None if arguments.dflash is None else dflash_assistant(arguments.dflash, target)
        self.compiled: Any = None
        if arguments.compiled:
            torch._inductor.config.freezing = True
            self.compiled = load_target(torch.float32)[0]  # one that is not packed: the compiler does it
        if arguments.packed:
            pack_linears(target)
            if self.dflash is not None:
                pack_linears(self.dflash, self.dflash.config.block_size)
        drafter.load_profile = LoadProfile.measure(target, drafter).live()  # measured with one row, corrected with more
        self._static_caches: dict[int, StaticCache] = {}
        self._forwards = 0
        target.register_forward_pre_hook(self._count)

    def _count(self, *_: Any) -> None:
        self._forwards += 1

    def methods(self, rows: int) -> list[str]:
        alone = rows == 1
        names = {
            "plain": True,
            "compiled plain": self.compiled is not None,
            "prompt lookup": alone,
            "transformers' DFlash": alone and self.dflash is not None,
            "DSpark, all verified": True,
            "DSpark": True,
        }
        return [name for name, given in names.items() if given]

    def run(self, inputs: BatchEncoding, setting: str, number: int, accounts: dict[str, Account]) -> None:
        """One call by every method, entered in `accounts`."""
        methods = self.methods(len(inputs["input_ids"]))
        if not accounts:
            accounts.update({method: Account() for method in methods})
        texts: dict[str, list[torch.Tensor]] = {}
        turn = number % len(methods)
        for method in methods[turn:] + methods[:turn]:
            texts[method] = self._call(method, inputs, setting, number, accounts[method])
        for method in methods:
            for row, mask in enumerate(inputs["attention_mask"]):
                sampled = SETTINGS[setting]["do_sample"]
                pair = texts["plain"][row], texts[method][row]
                accounts[method].matches["sampled" if sampled else match_texts(self.target, *pair, mask)] += 1

    def _call(self, method: str, inputs: BatchEncoding, setting: str, number: int, account: Account) -> list[torch.Tensor]:
        rows, width = inputs["input_ids"].shape
        options = {**SETTINGS[setting], "max_new_tokens": self.arguments.max_new_tokens}
        target, drafter = self.target, self.drafter
        if method == "compiled plain":
            target = self.compiled
            options |= self._static_options(inputs)
        elif method == "prompt lookup":
            options["prompt_lookup_num_tokens"] = self.arguments.lookup_tokens
        elif method == "transformers' DFlash":
            options |= {"assistant_model": self.dflash, "speculation_type": "dflash"}
        elif method != "plain":
            drafter.scheduling = "full" if method == "DSpark, all verified" else None
            options["assistant_model"] = drafter
        torch.manual_seed(number)
        self._forwards = 0
        started = time.perf_counter()
        ids = target.generate(**inputs, **options)
        seconds = time.perf_counter() - started
        texts = without_padding(ids, width, target.generation_config.eos_token_id)
        tokens = sum(len(text) - width for text in texts)
        account.seconds.append(seconds)
        account.tokens.append(tokens)
        if "assistant_model" in options and options["assistant_model"] is drafter:
            counts = drafter.statistics
            account.steps += counts.cycles
            account.verified, account.rejected = account.verified + counts.verified, account.rejected + counts.rejected
            account.within.append(seconds - counts.seconds["prefill"])
            account.forwards.append(sum(counts.seconds[phase] for phase in ("draft", "head", "verify")))
        else:  # of one row every forward is a step; of plain rows every token
            account.steps += self._forwards - 1 if rows == 1 and target is self.target else tokens - rows
        account.stepped += tokens - rows
        return texts

    def _static_options(self, inputs: BatchEncoding) -> dict[str, Any]:
        """Options of `generate` that make it run its compiled forward, which has been compiled by then."""
        config, rows = CompileConfig(mode="default"), len(inputs["input_ids"])
        config._compile_all_devices = True
        fresh = rows not in self._static_caches
        if fresh:  # one for all calls of as many rows: it is in the graph
            self._static_caches[rows] = StaticCache(config=self.target.config, max_cache_len=512)
        options = {"cache": self._static_caches[rows], "compile_config": config}
        if fresh:
            self.compiled.generate(**inputs, **options, max_new_tokens=4)
        options["cache"].reset()
        return options


def dflash_assistant(folder: str, target: PreTrainedModel) -> MuseGlimmerAssistantModel:
    """The class in which transformers has DFlash, with the weights of a drafter without heads."""
    drafter = DSparkDraftModel.from_pretrained(folder, dtype=target.dtype)
    config = drafter.config
    if config.markov_rank or config.sample_from_anchor or config.draft_vocab_size is not None:
        raise SystemExit(f"{folder} is no DFlash drafter: it needs markov_rank 0, the bonus anchor and the whole vocabulary.")
    names = (
        "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
        "rms_norm_eps", "rope_parameters", "max_position_embeddings", "hidden_act", "block_size", "mask_token_id",
        "target_layer_ids", "bos_token_id", "eos_token_id", "pad_token_id",
    )  # fmt: skip
    assistant = MuseGlimmerAssistantModel(
        MuseGlimmerAssistantConfig(
            **{name: getattr(config, name) for name in names}, layer_types=["full_attention"] * config.num_hidden_layers
        )
    )
    renamed = {"fc.weight": "encoder.fc.weight", "hidden_norm.weight": "encoder.output_norm_enc.weight"}
    assistant.load_state_dict({renamed.get(name, name): tensor for name, tensor in drafter.state_dict().items()})
    return assistant.eval()


def _sets_for(prompts: dict[str, Any], rows: int) -> list[tuple[str, Any]]:
    """The sets if each has so many prompts, or else one of all of them, taken in turns."""
    if min(map(len, prompts.values())) >= rows:
        return list(prompts.items())
    return [("all sets", [text for texts in zip(*prompts.values(), strict=False) for text in texts])]


def _batches(tokenizer: Any, prompts: Any, size: int) -> Iterator[BatchEncoding]:
    """Full batches of prompts: texts, or rows of token ids."""
    rows = [
        prompt.tolist() if isinstance(prompt, torch.Tensor) else encode_prompts(tokenizer, [prompt])["input_ids"][0].tolist()
        for prompt in prompts
    ]
    for start in range(0, len(rows) - size + 1, size):
        yield left_padded(rows[start : start + size], tokenizer.pad_token_id)


if __name__ == "__main__":
    main()
