"""Bulk answers are the target's own: the text of plain `generate`, whoever shares the batch, and none written twice."""

import json

import pytest
import torch
from scipy.stats import chisquare
from tiny import EOS, PAD, VOCABULARY, assert_same_text, tiny_target
from tiny_tokenizer import text, tiny_tokenizer
from transformers import BartConfig, BartForCausalLM

from hf_dspark import pack_linears
from hf_dspark.training.data import read_examples
from hf_dspark.training.regenerate import Request, answer_requests, regenerate_file

LONGEST = 14
PROMPTS = [[7, 9], [11, 8, 30, 21, 14, 40, 9, 33], [12], [12], [20, 31, 44, 17, 19], [25, 26, 27], [9] * 11, [13, 37]]


def answers_of(target, prompts, temperature=0.0, **options):
    """Answers by the number of their request."""
    requests = [Request(prompt, temperature, number) for number, prompt in enumerate(prompts)]
    options = {"eos_token_ids": [EOS], "max_new_tokens": LONGEST, "batch_size": 3} | options
    found = {request.key: (ids, finished) for request, ids, finished in answer_requests(target, requests, **options)}
    assert sorted(found) == list(range(len(prompts)))
    return [found[number] for number in range(len(prompts))]


@pytest.mark.parametrize(
    "kind, attention",
    [("llama", "sdpa"), ("llama", "eager"), ("mistral", "sdpa"), ("gemma2", "eager"), ("gemma3", "sdpa")],
)
def test_greedy_answers_are_those_of_generate(kind, attention):
    target = tiny_target(kind, attention=attention)
    ends = [EOS, 5, 17]  # rows leave at different times, and others take their places
    together = [answers_of(target, PROMPTS, eos_token_ids=ends, batch_size=size) for size in (1, 3, 64)]
    for prompt, found in zip(PROMPTS, zip(*together, strict=True), strict=True):
        inputs = {"input_ids": torch.tensor([prompt]), "attention_mask": torch.ones(1, len(prompt), dtype=torch.long)}
        plain = target.generate(**inputs, max_new_tokens=LONGEST, do_sample=False, eos_token_id=ends, pad_token_id=PAD)
        for answer, finished in found:
            assert_same_text(target, inputs, plain, torch.tensor([prompt + answer]))
            assert finished == (answer[-1] in ends)
            assert finished or len(answer) == LONGEST
    assert len({len(answer) for answer, _ in together[0]}) > 2


def test_packed_target_says_the_same():
    plain, packed = (answers_of(model, PROMPTS) for model in (tiny_target(), pack_linears(tiny_target(), rows=3)))
    assert plain == packed


def test_every_answer_may_end_with_its_first_token():
    everything = range(48)
    for answer, finished in answers_of(tiny_target(), PROMPTS, eos_token_ids=everything):
        assert len(answer) == 1 and finished


def test_samples_follow_the_target():
    """The first token, one of a row that joined late among them, and the second, behind a cache that others shared."""
    target, count, top_k, temperature = tiny_target(), 2000, 5, 0.8
    prompt = [7, 9, 21]
    found = answers_of(target, [prompt] * count, temperature, eos_token_ids=[], max_new_tokens=2, batch_size=50, top_k=top_k)
    drawn = torch.tensor([answer for answer, _ in found])

    def law(ids):
        with torch.no_grad():
            best = target(input_ids=torch.tensor([ids])).logits[0, -1].topk(top_k)
        return best.indices.tolist(), (best.values.double() / temperature).softmax(-1).tolist()

    def check(tokens, ids):
        kinds, probabilities = law(ids)
        observed = [int((tokens == kind).sum()) for kind in kinds]
        assert sum(observed) == len(tokens)  # nothing outside the top k
        expected = [p * len(tokens) for p in probabilities]
        assert chisquare(observed, expected).pvalue > 1e-4

    check(drawn[:, 0], prompt)
    most = int(drawn[:, 0].mode().values)
    check(drawn[drawn[:, 0] == most, 1], [*prompt, most])


def test_greedy_and_sampled_rows_share_a_batch_and_the_seed_decides():
    target, prompt = tiny_target(), [7, 9, 21]
    requests = [Request(prompt, temperature, n) for n, temperature in enumerate([0.0, 1.5, 0.0, 1.5, 1.5, 0.0])]

    def run(seed):
        answers = answer_requests(target, requests, eos_token_ids=[], max_new_tokens=12, batch_size=4, seed=seed)
        return {request.key: ids for request, ids, _ in answers}

    first, again, other = run(0), run(0), run(1)
    assert first == again
    assert first[0] == first[2] == first[5] == other[0]
    assert len({tuple(first[n]) for n in (0, 1, 3, 4)}) == 4
    assert first[1] != other[1]


# ---- files ----


def write(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def read(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def regenerate(prompts, output, **options):
    options = {"samples": 2, "max_new_tokens": 12, "batch_size": 3, "temperature": 1.5} | options
    return regenerate_file(tiny_target(seed=2), tiny_tokenizer(), prompts, output, **options)


@pytest.fixture
def prompts(tmp_path):
    records = [{"prompt": text(prompt)} for prompt in PROMPTS]  # one of them occurs twice
    records[4] = {"messages": [{"role": "user", "content": text(PROMPTS[4])}]}
    return write(tmp_path / "prompts.jsonl", records)


def keys(records):
    return sorted((json.dumps(record["messages"][:-1]), record["sample"]) for record in records)


def test_file_of_answers(prompts, tmp_path, capsys):
    output, tokenizer = tmp_path / "answers.jsonl", tiny_tokenizer()
    assert regenerate(prompts, output) == 16
    records = read(output)
    assert len(set(keys(records))) == 16
    for record in records:
        assert [message["role"] for message in record["messages"]] == ["user", "assistant"]
        ids = record["answer_ids"]
        assert record["messages"][-1]["content"] == tokenizer.decode(ids, skip_special_tokens=True)
        assert record["finished"] == (ids[-1] == EOS) and record["temperature"] == 1.5
        assert record["finished"] or len(ids) == 12
    assert "tokens/s" in capsys.readouterr().err
    examples = read_examples(output, tokenizer)
    assert [example["input_ids"][example["prompt_length"] :] for example in examples] == [
        record["answer_ids"] for record in records if len(record["answer_ids"]) > 1
    ]


def test_greedy_file_is_what_generate_says(prompts, tmp_path):
    output, target, tokenizer = tmp_path / "answers.jsonl", tiny_target(seed=2), tiny_tokenizer()
    regenerate(prompts, output, samples=1, temperature=0.0)
    for record in read(output):
        inputs = tokenizer.apply_chat_template(
            record["messages"][:-1], add_generation_prompt=True, return_dict=True, return_tensors="pt"
        )
        plain = target.generate(**inputs, max_new_tokens=12, do_sample=False)
        drafted = torch.cat([inputs["input_ids"], torch.tensor([record["answer_ids"]])], dim=1)
        assert_same_text(target, inputs, plain, drafted)


def test_a_killed_run_is_continued(prompts, tmp_path):
    output = tmp_path / "answers.jsonl"
    regenerate(prompts, output)
    everything, whole = keys(read(output)), output.read_bytes()
    lines = whole.splitlines(keepends=True)
    output.write_bytes(b"".join(lines[:5]) + lines[5][:20])  # killed in the middle of a line
    assert regenerate(prompts, output) == 11
    assert output.read_bytes().startswith(b"".join(lines[:5]))
    assert keys(read(output)) == everything
    output.write_bytes(output.read_bytes().removesuffix(b"\n"))  # the last answer is whole all the same
    assert regenerate(prompts, output) == 0

    assert regenerate(prompts, output, samples=3) == 8  # two prompts are the same and count as one with six answers
    assert len(set(keys(read(output)))) == 24


def test_further_samples_do_not_repeat_the_first(tmp_path):
    prompts = write(tmp_path / "prompts.jsonl", [{"prompt": text([7, 9])}])
    output = tmp_path / "answers.jsonl"
    for samples in (2, 4):
        regenerate(prompts, output, samples=samples, temperature=3.0)
    assert len({tuple(record["answer_ids"]) for record in read(output)}) == 4


def test_neighbours_have_similar_lengths(tmp_path, monkeypatch):
    lengths = [11, 2, 9, 3, 3, 8, 2, 10] * 12
    prompts = write(tmp_path / "p.jsonl", [{"prompt": text([6 + n % 40] * k)} for n, k in enumerate(lengths)])
    seen = []
    monkeypatch.setattr(
        "hf_dspark.training.regenerate.answer_requests", lambda target, requests, **kwargs: seen.extend(requests) or []
    )
    regenerate(prompts, tmp_path / "a.jsonl", samples=2, batch_size=3)
    assert len(seen) == 192
    order = torch.tensor([len(request.prompt_ids) for request in seen])
    assert int(order.diff().abs().sum()) == 4 * 9  # four windows, each from 2 to 11 words or back, and no jump between
    assert all(a.prompt_ids == b.prompt_ids for a, b in zip(seen[::2], seen[1::2], strict=True))  # they share a prefill


@pytest.mark.parametrize(
    "line",
    [
        "{not json",
        '{"prompt": 7}',
        '["w7"]',
        '{"messages": []}',
        '{"messages": [{"role": "user"}]}',
        '{"messages": [{"role": "user", "content": "w7"}, {"role": "assistant", "content": "w8"}]}',
        '{"prompt": "\udcff"}',
    ],
)
def test_bad_prompts_are_refused(line, tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(b'{"prompt": "w7"}\n\n' + line.encode(errors="surrogateescape") + b"\n")
    with pytest.raises(ValueError, match=r'prompts\.jsonl, line 3: expected \{"prompt": "\.\.\."\} or .*, got: ') as error:
        regenerate(path, tmp_path / "answers.jsonl")
    assert "\n" not in str(error.value)
    assert not (tmp_path / "answers.jsonl").exists()


def test_a_prompt_without_room_is_refused(tmp_path):
    path = write(tmp_path / "prompts.jsonl", [{"prompt": text([7] * 600)}])
    with pytest.raises(ValueError, match="a prompt has 604 tokens, which leaves no room for 12 more"):
        regenerate(path, tmp_path / "answers.jsonl")


def test_another_file_is_not_continued(prompts, tmp_path):
    output = tmp_path / "answers.jsonl"
    for number, content in enumerate(('{"prompt": "w7"}\n', '{"prompt": "w7"}', "{}\nprose", "prose", '{}\n{"messages": [')):
        output.write_text(content)
        with pytest.raises(ValueError, match=r"answers\.jsonl, line 1: expected an earlier answer"):
            regenerate(prompts, output)
        assert output.read_text() == content, number


def test_a_target_that_cannot_be_masked_is_refused():
    target = tiny_target()
    target.config.attention_chunk_size = 8
    with pytest.raises(ValueError, match="'chunked_attention'"):
        answers_of(target, PROMPTS)
    config = BartConfig(vocab_size=VOCABULARY, d_model=32, decoder_layers=1, decoder_attention_heads=4, decoder_ffn_dim=48)
    with pytest.raises(ValueError, match=r"BartForCausalLM takes no `position_ids`.*: write its answers with"):
        answers_of(BartForCausalLM(config).eval(), PROMPTS)
