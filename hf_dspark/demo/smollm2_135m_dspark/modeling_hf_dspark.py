"""Lets `AutoModel.from_pretrained(<this folder>, trust_remote_code=True)` load the drafter; the code is that of hf_dspark."""

from hf_dspark import DSparkConfig, DSparkDraftModel

__all__ = ["DSparkConfig", "DSparkDraftModel"]
