"""DSpark speculative decoding for transformers: `target.generate(..., assistant_model=drafter)`, faster and exact.

Letters in shapes, throughout the package: R rows (requests) of a batch, K draft tokens of a block, L scheduled ones (L ≤ K),
Q query tokens of a forward, S slots of a cache, C context rows, P prompt columns, D hidden size, V vocabulary, Vd draft
vocabulary, r rank of the sequential head, H attention heads.
"""

from transformers import AutoConfig, AutoModel

from .candidate_generator import CandidateBlock, DSparkCandidateGenerator
from .configuration_dspark import DSparkConfig
from .errors import CheckpointError
from .hooks import install, uninstall
from .load_profile import LoadProfile
from .modeling_dspark import DSparkDraftModel
from .packing import pack_linears
from .serving import Event, Request, ServingLoop, serve_batch
from .statistics import Round, Statistics

__version__ = "0.1.0"

AutoConfig.register(DSparkConfig.model_type, DSparkConfig, exist_ok=True)
AutoModel.register(DSparkConfig, DSparkDraftModel, exist_ok=True)
install()

__all__ = [
    "CandidateBlock",
    "CheckpointError",
    "DSparkCandidateGenerator",
    "DSparkConfig",
    "DSparkDraftModel",
    "Event",
    "LoadProfile",
    "Request",
    "Round",
    "ServingLoop",
    "Statistics",
    "install",
    "pack_linears",
    "serve_batch",
    "uninstall",
]
