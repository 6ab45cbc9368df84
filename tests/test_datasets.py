"""Data sets beside files: the same records, from a folder on this machine that `datasets` reads like one of the hub."""

import builtins
import json
import sys
from types import SimpleNamespace

import pytest
from tiny_tokenizer import text, tiny_tokenizer

from hf_dspark.training.data import read_examples, read_prompts


def conversation(word, **fields):
    messages = [{"role": "user", "content": text([word])}, {"role": "assistant", "content": text([word, 9, 10])}]
    return {"messages": messages} | fields


def write(path, records):
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def test_a_folder_is_read_like_a_file(tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    datasets.disable_progress_bars()
    answers = [conversation(7), conversation(8, answer_ids=[30, 31, 32]), conversation(11)]  # a column with gaps
    file = write(tmp_path / "set/train.jsonl", answers)
    both = [{"prompt": text([word]), **conversation(13)} for word in (12, 14)]
    write(tmp_path / "prompts/test.jsonl", both)
    folder, tokenizer = str(tmp_path / "set"), tiny_tokenizer()
    expected = read_examples(file, tokenizer)
    assert len(expected) == 3
    assert read_examples(folder, tokenizer) == expected
    assert read_examples(f"{folder}:train[1:]", tokenizer) == expected[1:]
    prompts = [[{"role": "user", "content": text([word])}] for word in (12, 14)]
    assert list(read_prompts(f"{tmp_path / 'prompts'}:test")) == prompts
    with pytest.raises(ValueError, match=r'set:train, row 0: expected \{"prompt": .*, got: columns messages$'):
        list(read_prompts(f"{folder}:train"))


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("user/set", ("user/set", None, "train")),
        ("user/set:test", ("user/set", None, "test")),
        ("user/set:main:test", ("user/set", "main", "test")),
        ("user/set:train[:2]", ("user/set", None, "train[:2]")),
        ("user/set:main:train[1:2]", ("user/set", "main", "train[1:2]")),
    ],
)
def test_what_a_name_says(name, expected, monkeypatch):
    seen = []

    def load_dataset(repo, config, split):
        seen.append((repo, config, split))
        return [{"prompt": "w7", "id": None}]

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    assert list(read_prompts(name)) == [[{"role": "user", "content": "w7"}]]
    assert seen == [expected]


def test_a_name_without_a_split_behind_its_colon(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=None))
    with pytest.raises(ValueError, match="NAME:CONFIGURATION:SPLIT, got 'user/set:'"):
        list(read_prompts("user/set:"))


def test_without_the_package(tmp_path, monkeypatch):
    plain_import = builtins.__import__

    def without(name, *args, **kwargs):
        if name == "datasets":
            raise ImportError(name)
        return plain_import(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ImportError, match=r"user/set is not a file, .* pip install '\.\[datasets\]'"):
        list(read_prompts("user/set"))
    with pytest.raises(FileNotFoundError):  # a name that can only be meant as a file's
        list(read_prompts(tmp_path / "missing.jsonl"))
