"""The comparison of plain decoding and DSpark counts what it says and calls differing texts by their name."""

import pytest
import torch
from tiny import EOS, PAD, tiny_drafter, tiny_target
from tiny_tokenizer import text, tiny_tokenizer

from hf_dspark.evaluation import Comparison, compare, encode_prompts, first_difference, match_texts, summarise

PROMPTS = [text(tokens) for tokens in ([7, 9], [11, 8, 30, 21], [12], [20, 31, 44, 17, 19, 6], [25, 26, 27])]


@pytest.fixture(scope="module")
def pair():
    target = tiny_target()
    return target, tiny_drafter(target)


def test_prompts_without_a_pad_token():
    tokenizer, alone = tiny_tokenizer(), tiny_tokenizer()
    tokenizer.pad_token = None
    inputs, expected = encode_prompts(tokenizer, PROMPTS), [encode_prompts(alone, [prompt]) for prompt in PROMPTS]
    for ids, mask, row in zip(inputs["input_ids"], inputs["attention_mask"], expected, strict=True):
        assert torch.equal(ids[mask.bool()], row["input_ids"][0]) and bool(mask[-int(mask.sum()) :].all())


@pytest.mark.parametrize("batch_size", [1, 2])
def test_rows_of_a_comparison(pair, batch_size):
    target, drafter = pair
    options = {"max_new_tokens": 30, "do_sample": False, "eos_token_id": None, "pad_token_id": PAD}
    rows = list(compare(target, tiny_tokenizer(), drafter, PROMPTS, batch_size=batch_size, **options))
    assert len(rows) == -(-len(PROMPTS) // batch_size)
    for number, row in enumerate(rows):
        assert row.match in ("same", "near-tie")
        prompts = len(PROMPTS[number * batch_size : (number + 1) * batch_size])
        assert row.plain_tokens == row.dspark_tokens == 30 * prompts
        assert row.committed == 29 * prompts  # the prefill gives each row its first token
        assert row.tau == row.committed / row.cycles > 1
        assert row.verified >= row.rejected > 0
        assert 0 < sum(row.seconds.values()) <= row.dspark_seconds
        assert row.ratio == pytest.approx(row.plain_seconds / row.plain_tokens * row.dspark_tokens / row.dspark_seconds)
        assert row.to_dict()["tau"] == row.tau and row.to_dict()["ratio"] == row.ratio
    assert any(row.match == "same" for row in rows)


def test_tokens_end_with_the_first_end_token(pair):
    """Padding behind a row that has finished is no token, be it the end token itself or another."""
    target, drafter = pair
    plain = target.generate(
        torch.tensor([[1, 4, 7, 9, 2, 5]]), attention_mask=torch.ones(1, 6), max_new_tokens=12, eos_token_id=None
    )
    end = int(plain[0, 10])
    expected = plain[0, 6:].tolist().index(end) + 1
    for pad in (PAD, end):
        (row,) = compare(
            target, tiny_tokenizer(), drafter, PROMPTS[:1], max_new_tokens=12, do_sample=False,
            eos_token_id=[EOS, end], pad_token_id=pad,
        )  # fmt: skip
        assert (row.plain_tokens, row.dspark_tokens) == (expected, expected)


def test_methods_take_turns(pair, monkeypatch):
    target, drafter = pair
    calls, generate = [], type(target).generate

    def recording(self, *args, **kwargs):
        calls.append("dspark" if "assistant_model" in kwargs else "plain")
        return generate(self, *args, **kwargs)

    monkeypatch.setattr(type(target), "generate", recording)
    list(compare(target, tiny_tokenizer(), drafter, PROMPTS[:3], max_new_tokens=3, do_sample=False))
    assert calls == ["plain", "dspark", "dspark", "plain", "plain", "dspark"]


def test_sampled_texts_are_not_compared(pair):
    target, drafter = pair
    rows = compare(target, tiny_tokenizer(), drafter, PROMPTS[:2], max_new_tokens=12, do_sample=True, temperature=2.0)
    assert [row.match for row in rows] == ["sampled", "sampled"]


def leading_target(lead, dtype=torch.float32):
    """A target whose two best logits, of tokens 7 and 8, are always `lead` apart."""
    target = tiny_target().to(dtype)
    with torch.no_grad():
        target.get_output_embeddings().weight.zero_()
    target.get_output_embeddings().register_forward_hook(
        lambda module, inputs, logits: logits.index_copy(
            -1, torch.tensor([7, 8]), logits.new_tensor([10.0 + lead, 10.0]).expand(*logits.shape[:-1], 2)
        )
    )
    return target


@pytest.mark.parametrize(
    "drafted, at",
    [
        ([20, 21, 7, 30, 31], None),
        ([20, 21, 8, 30, 31], 4),
        ([20, 21, 9, 30, 31], 4),  # neither of the two best
        ([20, 21, 7, 30], 6),  # ends sooner
        ([20, 21, 7, 30, 31, 32], 7),  # goes on
    ],
)
@pytest.mark.parametrize(
    "lead, dtype, outcome",
    [
        (0.0, torch.float32, "near-tie"),
        (0.0005, torch.float32, "near-tie"),
        (0.002, torch.float32, "differs"),
        (0.0625, torch.bfloat16, "near-tie"),
        (0.5, torch.bfloat16, "differs"),
    ],
)
def test_names_of_differences(drafted, at, lead, dtype, outcome):
    target = leading_target(lead, dtype)
    mask = torch.tensor([0, 1])
    plain = torch.tensor([PAD, 9, 20, 21, 7, 30, 31])
    other = torch.tensor([PAD, 9, *drafted])
    found = first_difference(target, plain, other, mask)
    between_the_best = drafted[2] == 8
    if at is None:
        assert found is None
    else:
        position, best, gap = found
        assert position == at and best == pytest.approx(10 + lead, abs=1e-4)
        assert gap == pytest.approx(lead if between_the_best else 10 + lead, abs=1e-4)
    expected = "same" if at is None else outcome if between_the_best else "differs"
    assert match_texts(target, plain, other, mask) == expected
    # Padding behind the shorter of two rows of a batch is no part of the text.
    padded = torch.nn.functional.pad(other, (0, 3), value=PAD)
    assert match_texts(target, plain, padded, mask, pad_token_id=PAD) == expected


def test_the_target_is_asked_as_it_was_when_it_chose(pair):
    """The logits are those of plain decoding: the padding of the prompt is left out."""
    target, _ = pair
    plain = torch.tensor([PAD, PAD, 9, 20, 21, 7])
    with torch.no_grad():
        logits = target(input_ids=plain[None, 2:5]).logits[0, -1]
    position, logit, lead = first_difference(target, plain, torch.tensor([PAD, PAD, 9, 20, 21, 8]), torch.tensor([0, 0, 1, 1]))
    assert position == 5
    assert (logit, lead) == pytest.approx((float(logits.max()), float(logits.max() - logits[[7, 8]].min())), abs=1e-5)


def test_summary_adds_up():
    phases = {"draft": 0.1, "verify": 0.5}
    rows = [
        Comparison(4.0, 2.0, 40, 40, 10, 39, 50, 20, "same", phases),
        Comparison(3.0, 3.0, 30, 30, 20, 29, 40, 10, "near-tie", phases),
        Comparison(2.0, 0.5, 20, 10, 5, 9, 10, 5, "same", {"draft": 0.0, "verify": 0.25}),
    ]
    assert [row.ratio for row in rows] == [2.0, 1.0, 2.0]
    summary = summarise(rows)
    assert summary == {
        "batches": 3,
        "ratio_median": 2.0,
        "ratio_total": pytest.approx((80 / 5.5) / (90 / 9)),
        "tau": 77 / 35,
        "match": {"same": 2, "near-tie": 1},
        "plain_tokens_per_second": 10.0,
        "dspark_tokens_per_second": pytest.approx(80 / 5.5),
        "verified": 100,
        "rejected": 35,
        "seconds": {"draft": pytest.approx(0.2), "verify": 1.25},
    }
    nothing_drafted = Comparison(1.0, 1.0, 1, 1, 0, 0, 0, 0, "same", phases)
    assert nothing_drafted.tau == summarise([nothing_drafted])["tau"] == 0.0
