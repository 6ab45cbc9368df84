"""Lets `target.generate(..., custom_generate=<this folder>, trust_remote_code=True)` draft; the code is that of hf_dspark."""

from hf_dspark.custom_generate import generate

__all__ = ["generate"]
