"""Sampled text with a drafter follows exactly the target's own law, and a generator that cheats is found out.

With a vocabulary of four tokens the law of whole texts can be written down: plain `generate` reports the distribution behind
every prefix. Thousands of drafted texts are then compared with it by a χ² test, whose seeds are fixed. Two cheats show that
the test can tell: a schedule that has seen the tokens it decides about, and a drafter that misreports its logits.
"""

import itertools
from dataclasses import replace

import pytest
import torch
from scipy.stats import chi2
from tiny import PAD, assert_some_accepted, one_thread, tiny_drafter, tiny_target  # noqa: F401

from hf_dspark import DSparkCandidateGenerator, LoadProfile, scheduling
from hf_dspark.profitability import Profitability
from hf_dspark.verification import accept_sampled

VOCABULARY, TOKENS = 4, 6
IMPOSSIBLE = 1e-4  # a p-value below this rejects exactness
PROMPT = [[1, 2, 0]]


@pytest.fixture(scope="module")
def target():
    target = tiny_target("qwen3", seed=1, vocab_size=VOCABULARY, num_hidden_layers=2)
    with torch.no_grad():
        target.lm_head.weight.mul_(0.35)  # so that every text has its chance
    return target


@torch.no_grad()
def drafter_for(target, mode=None, **config):
    """A drafter of three tokens whose confidence is high behind two of the four tokens and low behind the others."""
    shape = {"target_layer_ids": [-1, 0], "num_hidden_layers": 1, "block_size": 3, "own_share": 1.0}
    drafter = tiny_drafter(target, **(shape | config))
    drafter.scheduling = mode
    if (head := drafter.confidence_head) is not None:
        head.proj.bias.fill_(0.0)
        head.proj.weight.mul_(0.1)
        if head.with_markov:
            head.proj.weight[0, drafter.config.hidden_size :] = torch.tensor([2.2, -4.0, -4.0, 2.2])
    return drafter


def profile(rows):
    """A curve on which, for that many rows, one or two drafts pay and a third seldom does.

    Each row costs its share of a step, so that drafts of some rows pay although the batch lasts until the last row is done.
    """
    steps = {1: 100.0, 2: 85.0, 3: 72.0, 4: 55.0}
    return LoadProfile({1: 100.0 * rows} | {rows * size: rate for size, rate in steps.items()}, draft_seconds=0.001)


def generate(target, prompts, drafter=None, **options):
    options = {"max_new_tokens": 7, "eos_token_id": None, "top_k": 0, "pad_token_id": PAD} | options
    prompts = torch.tensor(prompts)
    return target.generate(prompts, attention_mask=torch.ones_like(prompts), do_sample=True, assistant_model=drafter, **options)


def law(target, prompt, tokens=TOKENS, **options):
    """Probability of every text of so many tokens behind `prompt`, one axis a token."""
    probabilities = torch.ones((), dtype=torch.float64)
    for length in range(tokens):
        prefixes = [[*prompt, *prefix] for prefix in itertools.product(range(VOCABULARY), repeat=length)]
        options = {"max_new_tokens": 1, "return_dict_in_generate": True, "output_scores": True} | options
        scores = generate(target, prefixes, **options).scores[0].double()
        shape = [VOCABULARY] * (length + 1)
        probabilities = probabilities[..., None] * scores.softmax(-1).view(shape)
    return probabilities


def p_value(counts, probabilities):
    """χ² test of counts against a law, cells with fewer than five expected taken together."""
    counts, expected = counts.flatten().double(), probabilities.flatten() * counts.sum()
    if (counts[expected == 0] > 0).any():
        return 0.0
    rare = expected < 5
    counts, expected = (torch.cat([values[~rare], values[rare].sum()[None]]) for values in (counts, expected))
    counts, expected = counts[expected > 0], expected[expected > 0]
    return float(chi2.sf(((counts - expected) ** 2 / expected).sum(), len(expected) - 1))


def tally(texts, tokens):
    """How often each text of so many tokens occurs, one axis a token."""
    return torch.zeros([VOCABULARY] * tokens).index_put_(tuple(texts[:, :tokens].unbind(1)), torch.ones(()), accumulate=True)


def sample(target, drafter, rows=128, calls=12, tokens=TOKENS, **options):
    """Drafted texts `(rows · calls, tokens)`; fails if the drafts were all kept, or all refused."""
    torch.manual_seed(0)
    options = {"max_new_tokens": tokens + 2} | options
    texts, truncated, counts = [], False, torch.zeros(2)
    for _ in range(calls):
        texts.append(generate(target, PROMPT * rows, drafter, **options)[:, len(PROMPT[0]) :][:, :tokens])
        truncated |= drafter.statistics.scheduled < drafter.statistics.drafted
        counts += torch.tensor([drafter.statistics.accepted, drafter.statistics.scheduled])
    accepted, scheduled = counts.tolist()
    assert 0 < accepted < scheduled
    return torch.cat(texts), truncated


def p_values(texts, exact):
    """Of the first three tokens and of the last three."""
    tokens = exact.ndim
    counts = tally(texts, tokens)
    windows = list(range(3, tokens)), list(range(tokens - 3))
    return [p_value(counts.sum(others), exact.sum(others)) for others in windows]


@pytest.mark.parametrize("mode", ["full", "threshold", "early_stop", "presampled", "history"])
def test_scheduling_modes(target, mode):
    drafter = drafter_for(target, mode)
    if mode == "history":  # what a drafter without confidence does
        drafter = drafter_for(target, enable_confidence_head=False)
    drafter.load_profile = profile(rows=128)
    texts, truncated = sample(target, drafter)
    assert truncated == (mode != "full")
    assert min(p_values(texts, law(target, PROMPT[0]))) > IMPOSSIBLE


def test_two_step(target):
    """Its capacity is that of two rounds ago, so only later tokens can show that it is old news."""
    drafter = drafter_for(target, "two_step", block_size=2)
    drafter.load_profile = profile(rows=128)
    texts, truncated = sample(target, drafter, tokens=8)
    assert truncated
    assert min(p_values(texts, law(target, PROMPT[0], tokens=8))) > IMPOSSIBLE


VARIANTS = {
    "temperature": ({}, {"temperature": 0.6}),
    "top-k": ({}, {"top_k": 2}),
    "top-p": ({}, {"top_p": 0.8, "temperature": 1.4}),
    "min-p": ({}, {"min_p": 0.2}),
    "prefix": ({}, {"repetition_penalty": 1.7}),
    "prefix and scores": ({}, {"repetition_penalty": 1.5, "temperature": 0.8, "top_k": 3}),
    "reduced": ({"draft_token_ids": [0, 2, 3]}, {"temperature": 0.8}),
    "reduced, prefix": ({"draft_token_ids": [0, 2, 3]}, {"sequence_bias": [[[2, 3], 2.0], [[0], -1.0]]}),
    "reduced, top-k": ({"draft_token_ids": [1, 2]}, {"top_k": 2}),
    "gated": ({"markov_head_type": "gated"}, {}),
    "rnn": ({"markov_head_type": "rnn"}, {}),
    "no head": ({"markov_rank": 0}, {}),
    "bonus anchor": ({"sample_from_anchor": False, "block_size": 4}, {}),
    "two candidates": ({"head_candidates": 2}, {}),
    "two candidates, prefix": ({"head_candidates": 2}, {"sequence_bias": [[[2, 3], 2.0], [[0], -1.0]]}),
    "one candidate, reduced, top-k": ({"head_candidates": 1, "draft_token_ids": [0, 2, 3]}, {"top_k": 2}),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_drafters_and_processors(target, variant, monkeypatch):
    monkeypatch.setattr(Profitability, "should_draft", lambda self, rows: True)  # else too many rounds of so short texts pause
    config, options = VARIANTS[variant]
    config = dict(config)
    candidates = config.pop("head_candidates", None)
    drafter = drafter_for(target, **config)
    drafter.head_candidates = candidates
    drafter.load_profile = profile(rows=64)
    texts, truncated = sample(target, drafter, rows=64, calls=8, **options)
    assert truncated
    assert min(p_values(texts, law(target, PROMPT[0], **options))) > IMPOSSIBLE


@pytest.mark.parametrize("mode", [None, "early_stop", "two_step"])
def test_rows_that_share_a_budget(target, mode):
    """Rows compete for places in the forward. Each still has its own law, and they stay independent of each other."""
    prompts = [[1, 2, 0], [3, 3, 1], [0, 2, 2]]
    drafter = drafter_for(target, mode)
    drafter.load_profile = profile(rows=12)
    torch.manual_seed(0)
    packed = []  # whether the target was given rows of different lengths as one
    with target.register_forward_pre_hook(
        lambda module, _, kwargs: packed.append(len(kwargs["input_ids"]) == 1), with_kwargs=True
    ):
        texts = torch.cat([generate(target, prompts * 4, drafter)[:, 3:].view(4, 3, -1) for _ in range(60)])
    assert_some_accepted(drafter)
    assert sum(packed) > 60
    laws = [law(target, prompt, tokens=5) for prompt in prompts]
    for row, exact in enumerate(laws):
        for place in range(3):
            axes = [axis for axis in range(5) if not place <= axis < place + 3]
            counts = tally(texts[:, row, place:], 3)
            assert p_value(counts, exact.sum(axes)) > IMPOSSIBLE
    for place in range(1, 5):
        axes = [axis for axis in range(5) if axis != place]
        first, second, third = (exact.sum(axes) for exact in laws)
        together = torch.einsum("a,b,c->abc", first, second, third)
        assert p_value(tally(texts[:, :, place], 3), together) > IMPOSSIBLE


def test_presampled_confidence_sees_no_sampled_token(target, monkeypatch):
    """From the same context it is the same, whatever is drawn; the head's usual reading is not."""
    propose, seen = DSparkCandidateGenerator.propose, {}

    def recording(self, *arguments):
        block = propose(self, *arguments)
        if block is not None:  # the context is the text so far
            values = tuple(round(value, 3) for value in block.confidence[0].tolist())
            seen.setdefault(tuple(arguments[0][0].tolist()), set()).add(values)
        return block

    monkeypatch.setattr(DSparkCandidateGenerator, "propose", recording)
    for mode, depends in (("presampled", False), ("threshold", True)):
        seen.clear()
        drafter = drafter_for(target, mode)
        drafter.load_profile = profile(rows=1)
        for seed in range(20):
            torch.manual_seed(seed)
            generate(target, PROMPT, drafter, max_new_tokens=5)
        assert (max(len(values) for values in seen.values()) > 1) == depends


# ---- negative controls: what must be found out ----


# The first draft token, whose confidence is calibrated to one half, pays only together with a confident second.
ALONE = LoadProfile({1: 100.0, 2: 60.0, 3: 55.0, 4: 50.0})
HALF = {"confidence_temperatures": [100.0, 1.0, 1.0]}


def one_row_at_a_time(target, drafter):
    """p-value of the first drafted token, each text a call of its own: no batch dilutes a decision."""
    texts, _ = sample(target, drafter, rows=1, calls=200, tokens=2)
    return p_value(tally(texts, 2).sum(0), law(target, PROMPT[0], tokens=2).sum(0))


@pytest.mark.parametrize("mode", ["threshold", "presampled"])
def test_one_row(target, mode):
    drafter = drafter_for(target, mode, **HALF)
    drafter.load_profile = ALONE
    assert one_row_at_a_time(target, drafter) > IMPOSSIBLE


def test_peeking_schedule_is_found_out(target, monkeypatch):
    """A search over confidences that have seen the sampled tokens: the one schedule this package never samples with."""
    monkeypatch.setattr(DSparkCandidateGenerator, "_choose_mode", lambda self: "search")
    drafter = drafter_for(target, **HALF)
    drafter.load_profile = ALONE
    assert one_row_at_a_time(target, drafter) < IMPOSSIBLE


def test_misreported_logits_are_found_out(target, monkeypatch):
    propose = DSparkCandidateGenerator.propose

    def misreporting(self, *arguments):
        block = propose(self, *arguments)
        return None if block is None else replace(block, logits=block.logits / 2)  # as if before the temperature

    monkeypatch.setattr(DSparkCandidateGenerator, "propose", misreporting)
    drafter = drafter_for(target, "full")
    texts, _ = sample(target, drafter, temperature=0.5)
    assert min(p_values(texts, law(target, PROMPT[0], temperature=0.5))) < IMPOSSIBLE


# ---- the paper's counterexample (arXiv 2607.05147, appendix) ----

A, B = 0, 1
P_TARGET, P_DRAFT = torch.tensor([0.7, 0.3]), torch.tensor([0.5, 0.5])
EXAMPLE = LoadProfile({1: 1.0, 2: 0.5, 3: 0.45})
SCHEDULES = {
    "early_stop": lambda confidence: scheduling.early_stop(confidence, EXAMPLE),
    "threshold": lambda confidence: scheduling.threshold(confidence, 0.5),
    "within_capacity": lambda confidence: scheduling.within_capacity(confidence, 1),
    "peeking": lambda confidence: scheduling.global_search(confidence, EXAMPLE),
}


def confidences(drafts):
    """a₁ = 0.8 always, c₂ = 0.9 behind A and 0 behind B: `(N, 2)` of draft tokens `(N, 2)`."""
    return torch.stack([torch.full((len(drafts),), 0.8), torch.where(drafts[:, 0] == A, 0.9, 0.0)], dim=1)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_appendix_example(schedule):
    drafts = torch.tensor([[first, second] for first in (A, B) for second in (A, B)])
    lengths = torch.cat([SCHEDULES[schedule](confidences(draft[None])) for draft in drafts])  # each a request of its own
    assert schedule != "early_stop" or lengths.tolist() == [0] * 4

    # The law of the first token, written out: all four drafts are equally likely.
    residual = (P_TARGET - P_DRAFT).clamp(min=0)
    residual /= residual.sum()
    first = torch.zeros(2)
    for draft, length in zip(drafts, lengths, strict=True):
        if length == 0:
            first += P_TARGET / 4
        else:
            kept = (P_TARGET / P_DRAFT)[draft[0]].clamp(max=1)
            first[draft[0]] += kept / 4
            first += (1 - kept) * residual / 4
    expected = [0.85, 0.15] if schedule == "peeking" else [0.7, 0.3]
    torch.testing.assert_close(first, torch.tensor(expected))

    # And as the package draws it.
    torch.manual_seed(0)
    count = 20_000
    which = torch.randint(4, (count,))
    tokens, judged = drafts[which], lengths[which]
    accepted, following = accept_sampled(
        tokens, judged, P_DRAFT.log().expand(count, 2, -1), P_TARGET.log().expand(count, 3, -1)
    )
    drawn = torch.where(accepted > 0, tokens[:, 0], following)
    p = p_value(torch.bincount(drawn, minlength=2), P_TARGET.double())
    assert p < IMPOSSIBLE if schedule == "peeking" else p > IMPOSSIBLE
    torch.testing.assert_close((drawn == A).float().mean(), torch.tensor(expected[0]), atol=0.015, rtol=0)
