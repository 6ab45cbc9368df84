"""Every option of `generate` means the same with a drafter as without: processors, stops, streams, outputs, caches."""

import logging
import re
from types import SimpleNamespace

import pytest
import torch
from tiny import (
    BOS,
    EOS,
    MASK,
    PAD,
    SHAPE,
    VOCABULARY,
    assert_some_accepted,
    draw_weights,
    jagged_profile,
    one_thread,  # noqa: F401
    padded_prompts,
    tiny_drafter,
    tiny_target,
    tiny_tokenizer,
)
from transformers import (
    BartConfig,
    BartForCausalLM,
    BloomConfig,
    BloomForCausalLM,
    DynamicCache,
    FalconConfig,
    FalconForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoConfig,
    GPTNeoForCausalLM,
    LogitsProcessor,
    LogitsProcessorList,
    MaxLengthCriteria,
    Phi3Config,
    Phi3ForCausalLM,
    QuantizedCache,
    StaticCache,
    StoppingCriteria,
    StoppingCriteriaList,
    SynthIDTextWatermarkingConfig,
    T5Config,
    T5ForConditionalGeneration,
    TemperatureLogitsWarper,
    TextIteratorStreamer,
    WatermarkingConfig,
)
from transformers.generation import stopping_criteria as host_criteria
from transformers.generation.streamers import BaseStreamer

from hf_dspark import target as target_module

BATCHES = {"one row": [5], "three rows": [2, 7, 4]}


@pytest.fixture(scope="module")
def target():
    return tiny_target("qwen3")


@pytest.fixture
def drafter(target):
    drafter = tiny_drafter(target)
    drafter.load_profile = jagged_profile()
    return drafter


@pytest.fixture(params=BATCHES)
def inputs(request):
    return padded_prompts(BATCHES[request.param])


def generate(target, inputs, drafter=None, **options):
    options = {"max_new_tokens": 18, "do_sample": False, "eos_token_id": None, "pad_token_id": PAD} | options
    return target.generate(**inputs, assistant_model=drafter, **options)


def new_tokens(inputs, sequences):
    return sequences[:, inputs["input_ids"].shape[1] :]


# ---- logits processors ----


class BansItsOwnRow(LogitsProcessor):
    """A user's processor that looks at the number of the row, and at its prefix."""

    def __call__(self, input_ids, scores):
        scores = scores.clone()
        for row, ids in enumerate(input_ids):
            scores[row, 4 + row : 40 : 5 + row] = -torch.inf
            scores[row, ids[-1]] = -torch.inf
        return scores


def allowed_tokens(prompts):
    """Allowed tokens that depend on the row and on its text; a text of another row has no continuation at all."""

    def allowed(row, ids):
        if not torch.equal(ids[: prompts.shape[1]], prompts[row]):
            return []
        return [token for token in range(4, 48) if (token + row + int(ids[-1])) % 3]

    return allowed


PROCESSORS = {
    "repetition_penalty": lambda text: {"repetition_penalty": 1.8},
    "no_repeat_ngram_size": lambda text: {"no_repeat_ngram_size": 1},
    "min_new_tokens": lambda text: {"min_new_tokens": 10, "eos_token_id": text[3]},
    "min_length": lambda text: {"min_length": 15, "eos_token_id": text[3]},
    "bad_words_ids": lambda text: {"bad_words_ids": [[text[2]], [text[5], text[6]]]},
    "sequence_bias": lambda text: {"sequence_bias": [[[text[1]], -4.0], [[text[4], text[5]], -6.0], [[9], 2.0]]},
    "suppress_tokens": lambda text: {"suppress_tokens": [text[2], text[8]]},
    "begin_suppress_tokens": lambda text: {"begin_suppress_tokens": [text[0]]},
    "forced_eos_token_id": lambda text: {"forced_eos_token_id": EOS},
    "exponential_decay": lambda text: {"exponential_decay_length_penalty": (3, 1.5), "eos_token_id": EOS},
    "encoder_repetition_penalty": lambda text: {"encoder_repetition_penalty": 5.0},
    "encoder_no_repeat_ngram_size": lambda text: {"encoder_no_repeat_ngram_size": 1},
    "watermarking": lambda text: {"watermarking_config": WatermarkingConfig(bias=3.0)},
    "self-hash watermarking": lambda text: {
        "watermarking_config": WatermarkingConfig(bias=3.0, seeding_scheme="selfhash", context_width=3),
        "max_new_tokens": 8,
    },
    "custom": lambda text: {"logits_processor": LogitsProcessorList([BansItsOwnRow()])},
    "several": lambda text: {"repetition_penalty": 1.3, "no_repeat_ngram_size": 3, "suppress_tokens": [text[4]]},
}


@pytest.mark.parametrize("name", PROCESSORS)
def test_logits_processors(target, drafter, inputs, name):
    text = new_tokens(inputs, generate(target, inputs))[0].tolist()
    options = PROCESSORS[name](text)
    plain = generate(target, inputs, **options)
    unchanged = generate(target, inputs, eos_token_id=options.get("eos_token_id"))[:, : plain.shape[1]]
    assert not torch.equal(plain, unchanged), "the option has no effect"
    assert torch.equal(generate(target, inputs, drafter, **options), plain)
    assert drafter.statistics.scheduled


def test_allowed_tokens_depend_on_the_row(target, drafter, inputs):
    options = {"prefix_allowed_tokens_fn": allowed_tokens(inputs["input_ids"])}
    plain = generate(target, inputs, **options)
    assert torch.equal(generate(target, inputs, drafter, **options), plain)
    assert_some_accepted(drafter)


def test_forced_first_token(target, drafter):
    inputs = padded_prompts([1])
    plain = generate(target, inputs, forced_bos_token_id=9)
    assert plain[0, 1] == 9
    assert torch.equal(generate(target, inputs, drafter, forced_bos_token_id=9), plain)


def test_processors_with_a_reduced_vocabulary(target, inputs):
    drafter = tiny_drafter(target, draft_token_ids=[token for token in range(48) if token % 4])
    options = {"repetition_penalty": 1.3, "suppress_tokens": [5, 6]}
    assert torch.equal(generate(target, inputs, drafter, **options), generate(target, inputs, **options))
    assert_some_accepted(drafter)
    # Nothing the drafter could say is allowed.
    options = {"suppress_tokens": [token for token in range(48) if token % 4]}
    assert torch.equal(generate(target, inputs, drafter, **options), generate(target, inputs, **options))


@pytest.mark.parametrize("extra", [{}, {"temperature": 0.7, "top_p": 0.9}, {"repetition_penalty": 1.4, "min_p": 0.05}])
def test_sampling_from_one_choice_is_greedy(target, drafter, inputs, extra):
    options = {"do_sample": True, "top_k": 1} | extra
    assert torch.equal(generate(target, inputs, drafter, **options), generate(target, inputs, **options))
    assert drafter.statistics.accepted


# ---- stopping ----


class StopsAtPair(StoppingCriteria):
    """Fires on two tokens in a row: in the middle of a block, if they were drafted."""

    def __init__(self, pair):
        self.pair = torch.tensor(pair)

    def __call__(self, input_ids, scores, **kwargs):
        return (input_ids[:, -2:] == self.pair).all(-1)


class StopsRows(StoppingCriteria):
    """Ends rows at different lengths, told apart by the last token of their prompts."""

    def __init__(self, prompts, counts):
        self.ends = {int(prompt[-1]): prompts.shape[1] + count for prompt, count in zip(prompts, counts, strict=True)}
        self.place = prompts.shape[1] - 1

    def __call__(self, input_ids, scores, **kwargs):
        return torch.tensor([len(ids) >= self.ends[int(ids[self.place])] for ids in input_ids])


class StopsPlaces(StoppingCriteria):
    """Ends rows at different lengths, told apart by their places."""

    def __init__(self, prompts, counts):
        self.ends = torch.tensor([prompts.shape[1] + count for count, _ in zip(counts, prompts, strict=True)])

    def __call__(self, input_ids, scores, **kwargs):
        return self.ends <= input_ids.shape[1]


class StopsAtUnsureToken(StoppingCriteria):
    """Reads the scores of the latest step."""

    def __call__(self, input_ids, scores, **kwargs):
        return scores[-1].softmax(-1).amax(-1) < 0.35


@pytest.mark.parametrize("place", [0, 1, 6, 17])
def test_end_token(target, drafter, inputs, place):
    new = new_tokens(inputs, generate(target, inputs))
    for ends in (int(new[0, place]), [EOS, int(new[0, place]), int(new[-1, 9])]):
        plain = generate(target, inputs, eos_token_id=ends)
        assert torch.equal(generate(target, inputs, drafter, eos_token_id=ends), plain)


def test_lengths(target, drafter, inputs):
    prompt_length = inputs["input_ids"].shape[1]
    for count in (1, 2, 5, 6, 7):
        plain = generate(target, inputs, max_new_tokens=count)
        assert plain.shape[1] == prompt_length + count
        assert torch.equal(generate(target, inputs, drafter, max_new_tokens=count), plain)
        options = {"max_new_tokens": None, "max_length": prompt_length + count}
        assert torch.equal(generate(target, inputs, drafter, **options), plain)
    # A criterion of the user takes the place of the configured length.
    criteria = StoppingCriteriaList([MaxLengthCriteria(prompt_length + 15)])
    options = {"stopping_criteria": criteria, "max_new_tokens": 9}
    plain = generate(target, inputs, **options)
    assert plain.shape[1] == prompt_length + 15
    assert torch.equal(generate(target, inputs, drafter, **options), plain)


def test_a_length_that_the_prompt_has_already(target, drafter, inputs):
    """One token is made before anything is asked, here as there."""
    criteria = StoppingCriteriaList([MaxLengthCriteria(inputs["input_ids"].shape[1])])
    plain = generate(target, inputs, stopping_criteria=criteria)
    assert plain.shape[1] == inputs["input_ids"].shape[1] + 1
    assert torch.equal(generate(target, inputs, drafter, stopping_criteria=criteria), plain)


def test_prompt_of_one_token(target, drafter):
    inputs = padded_prompts([1])
    assert torch.equal(generate(target, inputs, drafter), generate(target, inputs))


def test_time_runs_out(target, drafter, inputs, monkeypatch):
    assert torch.equal(generate(target, inputs, drafter, max_time=0.0), generate(target, inputs, max_time=0.0))
    # Rows end in the same step; without an end token they would otherwise run on to the length of the fastest.
    rounds, length = [], inputs["input_ids"].shape[1]
    drafter.on_round = rounds.append
    monkeypatch.setattr(host_criteria, "time", SimpleNamespace(time=lambda: len(rounds)))
    output = generate(target, inputs, drafter, max_new_tokens=60, max_time=4.5)
    grown = [sum(len(one.committed[row]) for one in rounds) for row in range(len(inputs["input_ids"]))]
    assert len(rounds) == 6 and output.shape[1] == length + min(grown) > length + 6
    assert torch.equal(output, generate(target, inputs, max_new_tokens=min(grown)))


def test_rows_that_run_on_end_with_the_time(target, drafter, monkeypatch):
    """All have stopped, one of them far ahead, and the others would go on to its length."""
    inputs, rounds = padded_prompts([2, 7, 4]), []
    drafter.on_round = rounds.append
    generate(target, inputs, drafter, max_new_tokens=60)
    grown = [sum(len(one.committed[row]) for one in rounds[:5]) for row in range(3)]
    ahead = grown.index(max(grown))
    assert max(grown) > min(grown) + 2
    ends = StoppingCriteriaList([StopsPlaces(inputs["input_ids"], [max(grown) if row == ahead else 1 for row in range(3)])])
    rounds.clear()
    monkeypatch.setattr(host_criteria, "time", SimpleNamespace(time=lambda: len(rounds)))
    output = generate(target, inputs, drafter, max_new_tokens=60, max_time=4.5, stopping_criteria=ends)
    assert len(rounds) == 6 and output.shape[1] < 7 + max(grown)
    assert torch.equal(output, generate(target, inputs, max_new_tokens=output.shape[1] - 7))


def test_stop_strings(target, drafter, inputs):
    tokenizer = tiny_tokenizer()
    new = new_tokens(inputs, generate(target, inputs, suppress_tokens=[PAD, EOS]))[0]
    for first in (0, 3, 8):
        stop = tokenizer.decode(new[first : first + 2])
        options = {"stop_strings": [stop, "never"], "tokenizer": tokenizer}
        options["suppress_tokens"] = [PAD, EOS]
        plain = generate(target, inputs, **options)
        assert stop in tokenizer.decode(new_tokens(inputs, plain)[0])
        assert torch.equal(generate(target, inputs, drafter, **options), plain)


@pytest.mark.parametrize("ends", [{"eos_token_id": EOS}, {}], ids=["with an end token", "without"])
def test_custom_criteria(target, drafter, inputs, ends):
    new = new_tokens(inputs, generate(target, inputs))
    prompts = inputs["input_ids"]
    for criterion in (
        StopsAtPair(new[0, 4:6].tolist()),
        StopsAtPair(new[-1, 9:11].tolist()),
        StopsRows(prompts, range(3, 3 + 6 * len(prompts), 6)),
        StopsRows(prompts, range(3 + 6 * len(prompts), 3, -6)),
        StopsPlaces(prompts, range(3, 3 + 6 * len(prompts), 6)),
        StopsPlaces(prompts, range(3 + 6 * len(prompts), 3, -6)),
    ):
        options = {"stopping_criteria": StoppingCriteriaList([criterion])} | ends
        plain = generate(target, inputs, **options)
        assert torch.equal(generate(target, inputs, drafter, **options), plain)
    options = {"stopping_criteria": StoppingCriteriaList([StopsAtUnsureToken()])} | ends
    options |= {"return_dict_in_generate": True, "output_scores": True}
    plain = generate(target, inputs, **options).sequences
    assert plain.shape[1] < prompts.shape[1] + 18
    assert torch.equal(generate(target, inputs, drafter, **options).sequences, plain)


# ---- streams ----


class Recorder(BaseStreamer):
    """Keeps what it was given, in order."""

    def __init__(self):
        self.calls = []

    def put(self, value):
        self.calls.append((value.dtype, value.tolist()))

    def end(self):
        self.calls.append("end")


@pytest.mark.parametrize("ends", ["by length", "by token", "by row"])
def test_stream(target, drafter, inputs, ends):
    options = {}
    if ends == "by token":
        options = {"eos_token_id": int(new_tokens(inputs, generate(target, inputs))[0, 7])}
    if ends == "by row":  # without an end token, rows that have stopped run on with the others
        counts = range(3, 3 + 5 * len(inputs["input_ids"]), 5)
        options["stopping_criteria"] = StoppingCriteriaList([StopsRows(inputs["input_ids"], counts)])
    plain, drafted = Recorder(), Recorder()
    generate(target, inputs, streamer=plain, **options)
    generate(target, inputs, drafter, streamer=drafted, **options)
    assert drafted.calls == plain.calls


def test_text_stream(target, drafter):
    inputs, tokenizer = padded_prompts([5]), tiny_tokenizer()
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
    sequences = generate(target, inputs, drafter, streamer=streamer)
    text = tokenizer.decode(new_tokens(inputs, sequences)[0], skip_special_tokens=True)
    assert "".join(streamer) == text and text


# ---- outputs ----


@pytest.mark.parametrize("kind", ["llama", "mistral"])
def test_recorded_outputs(kind, inputs):
    target = tiny_target(kind, attention="eager")
    drafter = tiny_drafter(target)
    new = new_tokens(inputs, generate(target, inputs))
    options = {
        "eos_token_id": int(new[-1, 13]),
        "repetition_penalty": 1.05,
        "return_dict_in_generate": True,
        "output_scores": True,
        "output_logits": True,
        "output_hidden_states": True,
        "output_attentions": True,
    }
    plain, drafted = generate(target, inputs, **options), generate(target, inputs, drafter, **options)
    assert torch.equal(plain.sequences, drafted.sequences)
    assert_some_accepted(drafter)
    assert set(plain.keys()) == set(drafted.keys())
    lengths = [
        next((step + 1 for step, token in enumerate(row) if token == options["eos_token_id"]), len(row))
        for row in new_tokens(inputs, plain.sequences).tolist()
    ]
    for name in ("scores", "logits"):
        assert len(plain[name]) == len(drafted[name]) == max(lengths)
        for step, (theirs, ours) in enumerate(zip(plain[name], drafted[name], strict=True)):
            unfinished = torch.tensor([step < length for length in lengths])
            assert theirs.shape == ours.shape and theirs.dtype == ours.dtype
            torch.testing.assert_close(theirs[unfinished], ours[unfinished], atol=1e-4, rtol=1e-4)
    real = inputs["attention_mask"].bool()
    for name in ("hidden_states", "attentions"):
        assert len(plain[name]) == len(drafted[name]) == max(lengths)
        for step, (theirs, ours) in enumerate(zip(plain[name], drafted[name], strict=True)):
            assert len(theirs) == len(ours)
            for their_layer, our_layer in zip(theirs, ours, strict=True):
                assert their_layer.shape == our_layer.shape and their_layer.dtype == our_layer.dtype
                for row, length in enumerate(lengths):
                    if step < length:
                        # What the padding of a prompt thinks is nobody's business.
                        queries = real[row] if step == 0 else slice(None)
                        their, our = (layer[row][..., queries, :] for layer in (their_layer, our_layer))
                        torch.testing.assert_close(their, our, atol=1e-4, rtol=1e-4)
    assert_same_cache(plain.cache, drafted.cache, inputs)


def test_states_alone(target, drafter, inputs):
    """A user's wish for all hidden states does not disturb the drafter's own capture, and is granted."""
    options = {"return_dict_in_generate": True, "output_hidden_states": True}
    plain, drafted = generate(target, inputs, **options), generate(target, inputs, drafter, **options)
    assert torch.equal(plain.sequences, drafted.sequences) and drafted.scores is None
    assert [len(step) for step in drafted.hidden_states] == [len(step) for step in plain.hidden_states]


# ---- caches ----


def assert_same_cache(theirs, ours, inputs):
    """Same keys and values, padding of the prompt aside."""
    assert type(theirs) is type(ours) and theirs.get_seq_length() == ours.get_seq_length()
    mask = inputs["attention_mask"].bool()
    for their_layer, our_layer in zip(theirs.layers, ours.layers, strict=True):
        for their, our in ((their_layer.keys, our_layer.keys), (their_layer.values, our_layer.values)):
            assert their.shape == our.shape
            first = max(0, int(theirs.get_seq_length()) - their.shape[2])  # a sliding layer has dropped what lies before
            real = torch.ones(len(their), first + their.shape[2], dtype=torch.bool)
            real[:, : mask.shape[1]] = mask
            real = real[:, first:]
            torch.testing.assert_close(their.transpose(1, 2)[real], our.transpose(1, 2)[real], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("form", ["everything", "only what is new", "embeddings"])
@pytest.mark.parametrize("kind", ["mistral", "gemma3"])
def test_conversation(kind, form, inputs):
    """Three turns with one cache. Rows end at different places, and their padding counts as text."""
    target = tiny_target(kind)
    drafter = tiny_drafter(target)
    end = int(new_tokens(inputs, generate(target, inputs))[0, 5])
    plain_cache, drafted_cache = DynamicCache(config=target.config), DynamicCache(config=target.config)
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    for turn in range(3):
        turn_inputs = {"input_ids": ids, "attention_mask": mask}
        if turn and form == "only what is new":
            turn_inputs["input_ids"] = ids[:, plain_cache.get_seq_length() :]
        if turn and form == "embeddings":
            del turn_inputs["input_ids"]
            with torch.no_grad():
                turn_inputs["inputs_embeds"] = target.get_input_embeddings()(ids)
        options = {"max_new_tokens": 12, "eos_token_id": end, "do_sample": False, "pad_token_id": PAD}
        plain = target.generate(**turn_inputs, cache=plain_cache, **options)
        drafted = target.generate(**turn_inputs, cache=drafted_cache, assistant_model=drafter if turn < 2 else None, **options)
        assert torch.equal(plain, drafted), f"turn {turn}"
        assert_same_cache(plain_cache, drafted_cache, inputs)
        prompt_length = 0 if "inputs_embeds" in turn_inputs else turn_inputs["input_ids"].shape[1]
        ids = torch.cat([ids, plain[:, prompt_length:], padded_prompts([3] * len(ids), seed=turn)["input_ids"]], dim=1)
        mask = torch.cat([mask, mask.new_ones(len(ids), ids.shape[1] - mask.shape[1])], dim=1)


def test_cache_of_rows_that_end_far_apart(monkeypatch):
    """What padding leaves in it is filled in a few columns at a time, and at no position that the target does not have."""
    monkeypatch.setattr(target_module, "_FILLED_AT_ONCE", 8)
    config = GPT2Config(
        vocab_size=VOCABULARY, n_positions=48, n_embd=32, n_layer=4, n_head=4, pad_token_id=PAD, bos_token_id=BOS,
        eos_token_id=EOS,
    )  # fmt: skip
    torch.manual_seed(0)
    target = GPT2LMHeadModel(config).eval()
    draw_weights(target)
    drafter = tiny_drafter(target)
    inputs = padded_prompts([4, 4])
    new = new_tokens(inputs, generate(target, inputs, max_new_tokens=44))
    end = next(int(token) for token in new[0, :10] if token not in new[1])
    options = {"max_new_tokens": 44, "eos_token_id": end, "return_dict_in_generate": True}
    plain, drafted = generate(target, inputs, **options), generate(target, inputs, drafter, **options)
    assert torch.equal(plain.sequences, drafted.sequences) and plain.sequences.shape[1] == 48
    assert_same_cache(plain.cache, drafted.cache, inputs)


def test_drafter_sees_only_what_it_was_told(target, drafter):
    """Of text that was in a cache already the drafter knows nothing: no empty slots stand in for it."""
    inputs, cache = padded_prompts([5]), DynamicCache(config=target.config)
    ids = generate(target, inputs, cache=cache)
    told, seen = 0, []

    def look(module, arguments):
        nonlocal told
        told += arguments[1].shape[1]  # new context rows
        seen.append((arguments[4].length, told + drafter.config.block_size))

    hook = drafter.register_forward_pre_hook(look)
    generate(target, {"input_ids": ids, "attention_mask": torch.ones_like(ids)}, drafter, cache=cache)
    hook.remove()
    assert len(seen) > 2
    assert all(attended == expected for attended, expected in seen)


@pytest.mark.parametrize("rows", [[5], [5, 5]])
def test_positions_of_the_new_tokens_alone(target, drafter, rows):
    """They may be given for what is not in the cache yet."""
    inputs, texts = padded_prompts(rows), []
    for assistant in (None, drafter):
        cache = DynamicCache(config=target.config)
        first = generate(target, inputs, assistant, cache=cache)
        more = torch.cat([first, padded_prompts([3] * len(rows), seed=1)["input_ids"]], dim=1)
        positions = torch.arange(cache.get_seq_length(), more.shape[1]).expand(len(rows), -1)
        new = {"input_ids": more[:, cache.get_seq_length() :], "attention_mask": torch.ones_like(more)}
        texts.append(generate(target, new, assistant, cache=cache, position_ids=positions))
    assert torch.equal(*texts)


@pytest.mark.parametrize("kind", ["llama", "mistral"])
def test_static_cache_from_an_earlier_turn(kind):
    """Text generated into a static cache can be gone on from with a drafter, as long as no window has been filled."""
    target = tiny_target(kind, **({"sliding_window": 64} if kind == "mistral" else {}))
    drafter = tiny_drafter(target)
    inputs = padded_prompts([4, 7])
    caches = [StaticCache(target.config, max_cache_len=60) for _ in range(2)]
    texts = []
    for cache, assistant in zip(caches, (None, drafter), strict=True):
        first = generate(target, inputs, assistant, cache=cache, max_new_tokens=8)
        mask = torch.cat([inputs["attention_mask"], torch.ones(2, 8, dtype=torch.long)], dim=1)
        more = {"input_ids": first, "attention_mask": mask}
        texts.append(generate(target, more, assistant, cache=cache, max_new_tokens=8))
    assert torch.equal(*texts)
    assert_same_cache(*caches, inputs)


@pytest.mark.parametrize("kind", ["llama", "gemma3"])
@pytest.mark.parametrize("implementation", ["static", "dynamic"])
def test_cache_implementations(kind, implementation, inputs):
    target = tiny_target(kind)
    drafter = tiny_drafter(target)
    options = {"cache_implementation": implementation, "return_dict_in_generate": True}
    plain, drafted = generate(target, inputs, **options), generate(target, inputs, drafter, **options)
    assert torch.equal(plain.sequences, drafted.sequences)
    assert_same_cache(plain.cache, drafted.cache, inputs)


def test_offloaded_cache(target, drafter, inputs):
    """Stays on the device, which is said in a warning; the text is the same."""
    drafted = generate(target, inputs, drafter, cache_implementation="offloaded")
    assert torch.equal(drafted, generate(target, inputs))


def test_lazily_made_cache_of_a_sliding_target(inputs):
    """A DynamicCache that was not told of the window keeps everything, and gets everything."""
    target = tiny_target("mistral")
    drafter = tiny_drafter(target)
    caches = DynamicCache(), DynamicCache()
    texts = [generate(target, inputs, assistant, cache=cache) for cache, assistant in zip(caches, (None, drafter), strict=True)]
    assert torch.equal(*texts)
    assert_same_cache(*caches, inputs)


@pytest.mark.parametrize("size", [1, 2, 3, 100])
def test_prefill_in_chunks(target, drafter, inputs, size):
    whole = generate(target, inputs, drafter)
    accepted = drafter.statistics.accepted_per_position
    assert torch.equal(generate(target, inputs, prefill_chunk_size=size), whole)
    assert torch.equal(generate(target, inputs, drafter, prefill_chunk_size=size), whole)
    assert drafter.statistics.accepted_per_position == accepted


def test_embeddings_as_prompt(target, drafter, inputs):
    with torch.no_grad():
        embeds = target.get_input_embeddings()(inputs["input_ids"])
    given = {"inputs_embeds": embeds, "attention_mask": inputs["attention_mask"]}
    plain = generate(target, given)
    assert torch.equal(new_tokens(inputs, generate(target, inputs)), plain)
    assert torch.equal(generate(target, given, drafter), plain)
    assert torch.equal(generate(target, given | {"input_ids": inputs["input_ids"]}, drafter), generate(target, inputs))


@pytest.mark.parametrize("cap", [1, 2, 4, 30])
def test_num_assistant_tokens(target, drafter, inputs, cap):
    drafter.load_profile = None
    options = {"num_assistant_tokens": cap}
    assert torch.equal(generate(target, inputs, drafter, **options), generate(target, inputs))
    assert [count > 0 for count in drafter.statistics.scheduled_per_position] == [k < cap for k in range(5)]


def test_a_block_beyond_the_default_of_transformers(target, inputs, caplog):
    logging.Logger.warning_once.cache_clear()
    drafter = tiny_drafter(target, block_size=22, sample_from_anchor=True)
    drafter.load_profile = None
    assert torch.equal(generate(target, inputs, drafter, max_new_tokens=30), generate(target, inputs, max_new_tokens=30))
    assert "drafts 22 tokens, and `num_assistant_tokens` is 20" in caplog.text
    assert drafter.statistics.scheduled_per_position[19] > 0 == drafter.statistics.scheduled_per_position[20]
    generate(target, inputs, drafter, max_new_tokens=30, num_assistant_tokens=22)
    assert drafter.statistics.scheduled_per_position[20] > 0


# ---- what cannot be exact is refused ----


REFUSALS = {
    "guidance": ({"guidance_scale": 1.5}, "`guidance_scale` runs a second sequence"),
    "ensemble": ({"assistant_ensemble_weight": 0.5}, "`assistant_ensemble_weight` mixes"),
    "synced": ({"synced_gpus": True}, "`synced_gpus`"),
    "no cache": ({"use_cache": False}, "leave `use_cache` at True"),
    "stateful watermark": (
        {"watermarking_config": SynthIDTextWatermarkingConfig(keys=[1, 2, 3], ngram_len=3)},
        "SynthIDTextWatermarkLogitsProcessor keeps a state",
    ),
    "weights without eager attention": (
        {"output_attentions": True, "return_dict_in_generate": True},
        'attn_implementation="eager"',
    ),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_refused_options(target, drafter, name):
    options, message = REFUSALS[name]
    with pytest.raises(ValueError, match=re.escape(message)):
        generate(target, padded_prompts([3]), drafter, **options)


def test_quantised_cache_is_refused(target, drafter):
    cache = QuantizedCache(backend="fp8", config=target.config)
    with pytest.raises(ValueError, match="a quantised cache cannot take back"):
        generate(target, padded_prompts([3]), drafter, cache=cache)


def test_full_sliding_cache_is_refused():
    target = tiny_target("mistral")
    cache = StaticCache(target.config, max_cache_len=60)
    inputs = padded_prompts([5])
    ids = generate(target, inputs, cache=cache)
    with pytest.raises(ValueError, match="StaticSlidingWindowLayer that already contains tokens"):
        generate(target, {"input_ids": ids, "attention_mask": torch.ones_like(ids)}, tiny_drafter(target), cache=cache)


def test_cache_that_holds_the_whole_prompt_is_refused(target, drafter):
    inputs, cache = padded_prompts([5]), DynamicCache(config=target.config)
    with torch.no_grad():
        target(**inputs, cache=cache)
    with pytest.raises(ValueError, match="`cache` already holds 5 tokens, and the prompt has 5"):
        generate(target, inputs, drafter, cache=cache)


SPECIAL = {"vocab_size": VOCABULARY, "pad_token_id": PAD, "bos_token_id": BOS, "eos_token_id": EOS}


@pytest.mark.parametrize(
    "model, config, reason",
    [
        (BloomForCausalLM, BloomConfig(hidden_size=32, n_layer=4, n_head=4, **SPECIAL), "takes no `position_ids`"),
        (
            BartForCausalLM,
            BartConfig(d_model=32, decoder_layers=4, decoder_attention_heads=4, decoder_ffn_dim=48, **SPECIAL),
            "takes no `position_ids`",
        ),
        (
            FalconForCausalLM,
            FalconConfig(hidden_size=32, num_hidden_layers=4, num_attention_heads=4, alibi=True, **SPECIAL),
            "makes its ALiBi positions from a mask of columns",
        ),
        (
            GPTNeoForCausalLM,
            GPTNeoConfig(hidden_size=32, num_layers=4, num_heads=4, attention_types=[[["global", "local"], 2]], **SPECIAL),
            "measures the windows of its local layers from the last column",
        ),
    ],
)
def test_targets_with_one_row_at_a_time(model, config, reason):
    """Their positions, or what they see, are counted for all rows alike."""
    torch.manual_seed(0)
    target = model(config).eval()
    drafter = tiny_drafter(target)
    inputs = padded_prompts([4])
    assert torch.equal(generate(target, inputs, drafter), generate(target, inputs))
    with pytest.raises(ValueError, match=f"{model.__name__} {reason}.*: generate one row at a time"):
        generate(target, padded_prompts([4, 4]), drafter)


def test_a_target_that_starts_over_is_refused():
    """Phi3 drops the cache of a text that outgrows its original context."""
    shape = SHAPE | {"vocab_size": VOCABULARY, "original_max_position_embeddings": 16}
    del shape["head_dim"]
    torch.manual_seed(0)
    target = Phi3ForCausalLM(Phi3Config(**shape)).eval()
    drafter = tiny_drafter(target)
    for length, new in ((20, 4), (10, 12)):  # in the prompt, and in the answer
        with pytest.raises(ValueError, match="Phi3ForCausalLM starts over with a cache of its own"):
            generate(target, padded_prompts([length]), drafter, max_new_tokens=new)
    inputs = padded_prompts([5])
    assert torch.equal(generate(target, inputs, drafter, max_new_tokens=6), generate(target, inputs, max_new_tokens=6))


ROPES = {
    "dynamic": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0},
    "longrope": {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "original_max_position_embeddings": 16,
        "factor": 4.0,
        "short_factor": [1.0] * 4,
        "long_factor": [3.0] * 4,
    },
}


@pytest.mark.parametrize("kind", ROPES)
def test_a_rope_that_changes_with_the_length_is_refused(kind):
    limit = 16
    target = tiny_target(rope_parameters=ROPES[kind], max_position_embeddings=64 if kind == "longrope" else limit)
    drafter = tiny_drafter(target)
    cases = [([4, 6], 10, False), ([4, 6], 11, True), ([20, 17], 12, kind == "dynamic"), ([20, 16], 4, True)]
    for lengths, new, refused in cases:
        inputs = padded_prompts(lengths)
        if refused:
            with pytest.raises(ValueError, match=f"the target's '{kind}' rope changes with the length of the text from 16"):
                generate(target, inputs, drafter, max_new_tokens=new)
        else:
            plain = generate(target, inputs, max_new_tokens=new)
            assert torch.equal(generate(target, inputs, drafter, max_new_tokens=new), plain)
    # A text that is not among `input_ids` counts as well.
    inputs = padded_prompts([10])
    embeds = {"inputs_embeds": target.get_input_embeddings()(inputs["input_ids"]), "attention_mask": inputs["attention_mask"]}
    cache = DynamicCache(config=target.config)
    with torch.no_grad():
        target(input_ids=inputs["input_ids"][:, :9], cache=cache)
    later = {"input_ids": inputs["input_ids"][:, 9:], "attention_mask": inputs["attention_mask"], "cache": cache}
    for given in (embeds, later):
        with pytest.raises(ValueError, match="prompt and answer may reach 17"):
            generate(target, given, drafter, max_new_tokens=7)
    assert generate(target, later, drafter, max_new_tokens=6).shape[1] == 7


def test_encoder_decoder_is_refused(drafter):
    config = T5Config(
        vocab_size=48, d_model=32, d_kv=8, d_ff=48, num_layers=1, num_decoder_layers=2, num_heads=4,
        decoder_start_token_id=PAD,
    )  # fmt: skip
    with pytest.raises(ValueError, match="cannot assist an encoder-decoder model"):
        generate(T5ForConditionalGeneration(config).eval(), padded_prompts([3]), drafter)


@pytest.mark.parametrize(
    "field, other",
    [
        ("vocab_size", {"vocab_size": 50}),
        ("hidden_size", {"hidden_size": 64, "target_hidden_size": 32}),
        ("target_hidden_size", {"target_hidden_size": 16}),
        ("num_target_layers", {"num_target_layers": 5}),
    ],
)
def test_wrong_pair_is_refused(target, field, other):
    stranger = tiny_drafter(target, markov_rank=4, teach=False, **other)
    with pytest.raises(ValueError, match=f"does not belong to this target: `{field}` of the drafter is"):
        stranger.bind(target)
    # Vocabularies of different size do not even get past transformers, which has its own words for it.
    message = "different tokenizers" if field == "vocab_size" else f"`{field}` of the drafter is"
    with pytest.raises(ValueError, match=message):
        generate(target, padded_prompts([3]), stranger)


def test_unbound_drafter_says_how_to_bind_it(target):
    with pytest.raises(RuntimeError, match="this drafter is not bound to a target"):
        tiny_drafter(target).embed(torch.tensor([[MASK]]))


class Grammar(LogitsProcessor):
    """Even tokens follow odd ones and the reverse; knows no other texts."""

    def __init__(self, prompt_length):
        self.prompt_length = prompt_length

    def __call__(self, input_ids, scores):
        text = input_ids[:, self.prompt_length - 1 :]
        if bool((text.diff(dim=1) % 2 == 0).any()):
            raise KeyError("no such text")
        allowed = torch.arange(scores.shape[1]) % 2 != input_ids[:, -1:] % 2
        return scores.masked_fill(~allowed, -torch.inf)


@pytest.mark.parametrize("sampling", [{"do_sample": False}, {}, {"eta_cutoff": 3e-4}, {"top_h": 0.9}])
@pytest.mark.parametrize("drafts", ["one candidate", "reduced vocabulary"])
def test_processors_are_not_shown_what_they_have_banned(target, drafts, sampling):
    drafter = tiny_drafter(target, draft_token_ids=[4, 6, 8, 10] if drafts == "reduced vocabulary" else None)
    drafter.head_candidates = 1 if drafts == "one candidate" else None
    inputs = padded_prompts([5, 5])
    options = {"logits_processor": LogitsProcessorList([Grammar(5)]), "max_new_tokens": 30, "eos_token_id": None}
    sampling = {"do_sample": True} | sampling
    texts = target.generate(**inputs, assistant_model=drafter, pad_token_id=PAD, **options, **sampling)
    assert bool((texts[:, 4:].diff(dim=1) % 2 == 1).all())
    assert drafter.statistics.drafted > drafter.statistics.scheduled > 0
    if not sampling["do_sample"]:
        assert torch.equal(texts, generate(target, inputs, **options))


class KnowsNothingBehindAnEnd(LogitsProcessor):
    def __init__(self, end):
        self.end = end

    def __call__(self, input_ids, scores):
        if bool((input_ids[:, -1] == self.end).any()):
            raise KeyError("no such text")
        return scores


@pytest.mark.parametrize("do_sample", [False, True])
def test_processors_are_not_shown_what_is_behind_an_end(target, drafter, do_sample):
    inputs = padded_prompts([5])
    free = new_tokens(inputs, generate(target, inputs))[0].tolist()
    end = next(token for place, token in enumerate(free) if place >= 4 and token not in free[:place])
    options = {"eos_token_id": end, "logits_processor": LogitsProcessorList([KnowsNothingBehindAnEnd(end)])}
    drafter.scheduling = "full"
    texts = generate(target, inputs, drafter, do_sample=do_sample, **options)
    if not do_sample:
        assert torch.equal(texts, generate(target, inputs, **options)) and texts[0, -1] == end
    torch.manual_seed(0)
    for _ in range(5 if do_sample else 0):  # some of which end
        generate(target, inputs, drafter, do_sample=True, top_k=2, **options)


class HeatOfRow(TemperatureLogitsWarper):
    """A processor of the user made from one of the host: a temperature for each row."""

    def __init__(self, penalties):
        super().__init__(1.0)
        self.penalties = penalties

    def __call__(self, input_ids, scores):
        assert len(scores) == len(self.penalties)
        repeated = torch.zeros_like(scores).scatter_(1, input_ids, 1.0)
        return scores - self.penalties[:, None] * repeated


def test_a_subclass_of_a_processor_is_the_users(target, drafter):
    inputs = padded_prompts([5, 3])
    options = {"logits_processor": LogitsProcessorList([HeatOfRow(torch.tensor([0.0, 50.0]))])}
    plain = generate(target, inputs, **options)
    assert torch.equal(generate(target, inputs, drafter, **options), plain)
    assert not torch.equal(plain, generate(target, inputs))


class Forgetful(DynamicCache):
    """A cache with ideas of its own."""


def test_a_cache_from_elsewhere_is_refused(target, drafter):
    with pytest.raises(ValueError, match="`cache` is or holds a Forgetful, a class from outside transformers"):
        generate(target, padded_prompts([5]), drafter, cache=Forgetful(config=target.config))


@pytest.mark.parametrize("lengths", [[5], [5, 5], [5, 3]])
def test_router_logits_are_left_out(lengths):
    """`generate` does not return them, and the loss made of them takes no masks but those of plain decoding."""
    target = tiny_target("qwen3_moe")
    inputs = padded_prompts(lengths)
    plain = generate(target, inputs)
    target.config.output_router_logits = True
    assert torch.equal(generate(target, inputs, tiny_drafter(target)), plain)


def test_token_healing_may_shorten_the_prompt(target, drafter):
    tokenizer = tiny_tokenizer()
    ids = torch.tensor([[20, 9, 31, 17, *[BOS] * 8]])  # special tokens at the end, which healing drops
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    options = {"token_healing": True, "tokenizer": tokenizer}
    plain = generate(target, inputs, **options)
    assert plain.shape[1] == 4 + 18
    assert torch.equal(generate(target, inputs, drafter, **options), plain)
    assert drafter.statistics.accepted


def test_an_end_token_without_a_dimension(target, drafter):
    inputs = padded_prompts([5])
    end = int(new_tokens(inputs, generate(target, inputs))[0, 7])
    options = {"stopping_criteria": StoppingCriteriaList([host_criteria.EosTokenCriteria(torch.tensor(end))])}
    plain = generate(target, inputs, **options)
    assert torch.equal(generate(target, inputs, drafter, **options), plain)


def test_flash_attention_drafts_for_one_row_at_a_time(target, drafter):
    drafter.config._attn_implementation = "flash_attention_2"
    with pytest.raises(ValueError, match="'flash_attention_2' cannot run rows of different lengths"):
        generate(target, padded_prompts([3, 5]), drafter)


def test_unknown_schedules_are_refused(target, drafter):
    drafter.scheduling = "search"  # exists, but only as the choice of greedy decoding
    with pytest.raises(ValueError, match="`scheduling` must be None or one of full, threshold"):
        generate(target, padded_prompts([3]), drafter)
    unsure = tiny_drafter(target, enable_confidence_head=False)
    unsure.scheduling = "threshold"
    with pytest.raises(ValueError, match="has no confidence head"):
        generate(target, padded_prompts([3]), unsure)


@pytest.mark.parametrize("count", [0, -1, 2.5, "64"])
def test_candidates_of_the_head_are_a_number(target, drafter, count):
    drafter.head_candidates = count
    with pytest.raises(ValueError, match="`head_candidates` must be None or a number of tokens from 1"):
        generate(target, padded_prompts([3]), drafter)
