"""The target's own prompts: where a user's text begins and ends, and what is thrown away."""

import json

import pytest
from tiny import BOS, EOS, one_thread, tiny_target  # noqa: F401
from tiny_tokenizer import USER, text, tiny_tokenizer

from hf_dspark.training.synthesize import is_repetitive, synthesize_file, user_turn


def test_where_a_users_text_stands():
    assert user_turn(tiny_tokenizer()) == ([BOS, USER], [EOS])
    hidden = tiny_tokenizer()
    hidden.chat_template = "{% for message in messages %}{{ message['content'] | upper }}{% endfor %}"
    with pytest.raises(ValueError, match="does not show a user's text as it is"):
        user_turn(hidden)


@pytest.mark.parametrize(
    "ids, expected",
    [([1, 2, 3], False), (list(range(20)), False), ([1, 2, 3, 4] * 4, True), ([*range(12), 0, 1, 2, 3], False)],
)
def test_repetition(ids, expected):
    assert is_repetitive(ids) is expected


def test_prompts_are_written_and_continued(tmp_path):
    target, tokenizer, path = tiny_target(seed=3), tiny_tokenizer(), tmp_path / "prompts.jsonl"
    known = text([7, 9])
    path.write_text(json.dumps({"prompt": known}))  # as some editors leave it, without an end
    options = {"max_new_tokens": 40, "batch_size": 16, "temperature": 1.5}
    counts = synthesize_file(target, tokenizer, path, 11, **options)
    prompts = [json.loads(line)["prompt"] for line in path.read_text().splitlines()]
    assert counts["written"] == len(prompts) - 1 > 0
    assert prompts[0] == known and len(set(prompts)) == len(prompts)
    assert all(prompt and EOS not in tokenizer(prompt)["input_ids"] for prompt in prompts)
    assert sum(counts.values()) <= 40  # four attempts each

    before = path.read_bytes()
    again = synthesize_file(target, tokenizer, path, len(prompts), **options)
    assert again["written"] == 0 and path.read_bytes() == before
    more = synthesize_file(target, tokenizer, path, len(prompts) + 2, **options)
    assert more["written"] > 0 and path.read_bytes().startswith(before)


def test_greedy_prompts_are_refused(tmp_path):
    with pytest.raises(ValueError, match="`temperature` must be above 0"):
        synthesize_file(tiny_target(), tiny_tokenizer(), tmp_path / "out.jsonl", 3, temperature=0.0)
    assert not (tmp_path / "out.jsonl").exists()
