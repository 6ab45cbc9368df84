"""A tokenizer of 48 words for the tiny targets, with a chat template; nothing is downloaded."""

from tiny import VOCABULARY
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast

_SPECIAL = ["<pad>", "<s>", "</s>", "<mask>", "<user>", "<assistant>"]
USER, ASSISTANT, FIRST_WORD = 4, 5, 6
_TEMPLATE = (
    "<s>{% for message in messages %} <{{ message.role }}> {{ message.content }} </s>{% endfor %}"
    "{% if add_generation_prompt %} <assistant>{% endif %}"
)


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """Tokens 0 to 3 are pad, bos, eos and an unused mask token, as in the tiny targets; word i is `w<i>`."""
    words = [*_SPECIAL, *(f"w{token}" for token in range(FIRST_WORD, VOCABULARY))]
    tokenizer = Tokenizer(WordLevel({word: token for token, word in enumerate(words)}, unk_token="<pad>"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        mask_token="<mask>",
        extra_special_tokens=["<user>", "<assistant>"],
        chat_template=_TEMPLATE,
        padding_side="left",
    )


def text(tokens: list[int]) -> str:
    """The words of some tokens, none of them special."""
    return " ".join(f"w{token}" for token in tokens)
