"""The drafter: a small non-causal transformer over one block of tokens.

A block is the anchor (the target's newest token) followed by mask tokens. Every slot attends to all context before the
anchor and to the whole block, so one forward drafts all K tokens (arXiv 2607.05147, section 2). The context is not text but
what the target already thought about it: the hidden states of a few target layers, concatenated and projected once,
`H_ctx = RMSNorm(W_c [H^(l1); …; H^(lm)])`. Each draft layer makes its own keys and values from it, and a cache keeps them,
so a round only projects the rows that are new.

Embedding and LM head are the target's, by reference: never copied, never saved (see `bind`).
Parameter names are those of the DeepSpec checkpoints.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding
from transformers.utils import logging

from .configuration_dspark import DSparkConfig
from .errors import CheckpointError
from .formats import find_target_copies, packaging_of, read_checkpoint
from .formats.files import DOWNLOAD_OPTIONS, LOAD_PROFILE_NAME, find_folder, progress_bars_off, replaced_files
from .formats.own import AUTO_MAP, DRAFTER_FIELDS, write_code_files
from .formats.target_copies import TargetCopies
from .heads import MARKOV_HEADS, ConfidenceHead
from .layers import BACKBONES
from .load_profile import LoadProfile
from .packing import PackedLinear, is_packed
from .statistics import Round, Statistics

logger = logging.get_logger(__name__)

_UPLOAD_OPTIONS = ("commit_message", "commit_description", "private", "token", "revision", "create_pr", "tags")


class DSparkPreTrainedModel(PreTrainedModel):
    """What the host needs to know about drafters: loading, attention back ends, what may not be split."""

    config_class = DSparkConfig
    config: DSparkConfig
    base_model_prefix = ""
    main_input_name = "noise_embeds"
    supports_gradient_checkpointing = True
    _no_split_modules = [layer.__name__ for layer in BACKBONES.values()]
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_flex_attn = True
    _supports_attention_backend = True


class DSparkDraftModel(DSparkPreTrainedModel):
    r"""A drafter to pass as `assistant_model=` to `generate`.

    Args:
        config ([`DSparkConfig`]): shape and conventions.

    Attributes:
        load_profile ([`LoadProfile`], *optional*): what a forward of the target costs here, and the load to plan for. Without
            one every drafted token is verified. Saved and loaded with the checkpoint; one that was measured on another
            machine or target is then not used unless it is set anew.
        scheduling (`str`, *optional*): `"full"`, `"threshold"`, `"early_stop"`, `"two_step"`, `"presampled"`, or `None`
            (default) for the best exact one: a search with fresh confidences in greedy decoding, `"presampled"` in sampling.
        confidence_threshold (`float`, defaults to 0.5): for `scheduling="threshold"`.
        threshold_on (`str`, defaults to `"conditional"`): whether the threshold applies to each c_k or to their product.
        head_candidates (`int`, *optional*): how many tokens of a position the sequential head chooses among, those the parallel
            stage finds likeliest; all if not set. With a large vocabulary and few processors, most of the head's time is
            spent on tokens without a chance. What is drafted may change, what is generated does not; a drafter whose head does
            much of the guessing loses acceptance.
        statistics ([`Statistics`]): counts and seconds of the latest `generate`, or of a serving loop.
        folder (`Path`, *optional*): where its files lie, downloaded or not.
        on_round (callable, *optional*): called with a [`Round`] after every forward of the target, prefill included; for
            traces and displays.
    """

    d2t: Tensor
    t2d: Tensor

    def __init__(self, config: DSparkConfig):
        super().__init__(config)
        self.fc = nn.Linear(len(config.target_layer_ids) * config.target_hidden_size, config.hidden_size, bias=False)
        layer_class = BACKBONES[config.backbone_type]
        self.hidden_norm = layer_class.norm_class(config.hidden_size, eps=config.rms_norm_eps)
        self.layers = nn.ModuleList(layer_class(config, index) for index in range(config.num_hidden_layers))
        self.norm = layer_class.norm_class(config.hidden_size, eps=config.rms_norm_eps)
        self.rotary_emb = Qwen3RotaryEmbedding(config)  # type: ignore[arg-type]  # only reads rope fields
        self.markov_head = MARKOV_HEADS[config.markov_head_type](config) if config.markov_rank else None
        self.confidence_head = ConfidenceHead(config) if config.enable_confidence_head else None
        if config.draft_vocab_size is not None:
            # speculators' convention: draft token i stands for target token i + d2t[i]
            self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.long))
            self.register_buffer("t2d", torch.zeros(config.vocab_size, dtype=torch.bool))
        self.gradient_checkpointing = False
        self.load_profile: LoadProfile | None = None
        self._profile_along: LoadProfile | None = None  # that was loaded with the checkpoint
        self._profile_set_aside: LoadProfile | None = None  # that one, where it is of another machine; saved all the same
        self.scheduling: str | None = None
        self.confidence_threshold = 0.5
        self.threshold_on = "conditional"
        self.head_candidates: int | None = None
        self.statistics = Statistics(config.num_draft_tokens)
        self.on_round: Callable[[Round], None] | None = None
        self.folder: Path | None = None
        self._target: _BoundTarget | None = None
        self._target_copies: TargetCopies | None = None
        self.post_init()

    def project_context(self, target_hidden_states: Tensor) -> Tensor:
        """H_ctx of captured target states.

        Args:
            target_hidden_states (`torch.Tensor` of shape `(R, C, m · target_hidden_size)`): of the m `target_layer_ids`.

        Returns:
            `torch.Tensor` of shape `(R, C, D)`.
        """
        return self.hidden_norm(self.fc(target_hidden_states.to(self.fc.weight.dtype)))

    def forward(
        self,
        noise_embeds: Tensor,
        context_hidden_states: Tensor,
        position_ids: Tensor,
        attention_mask: Any = None,
        cache: Cache | None = None,
        **kwargs,
    ) -> BaseModelOutput:
        """The parallel stage.

        Args:
            noise_embeds (`torch.Tensor` of shape `(R, Q, D)`): embeddings of anchor and mask tokens, one or several blocks.
            context_hidden_states (`torch.Tensor` of shape `(R, C, D)`): new context rows, from `project_context`.
            position_ids (`torch.LongTensor` of shape `(R, C + Q)`): rope positions of the context rows, then of the block.
            attention_mask (*optional*): what each of the Q slots may see, in the form the attention implementation takes
                (see [`~hf_dspark.cache.format_mask`]); everything when `None`.
            cache ([`~hf_dspark.cache.SlotCache`], *optional*): keys and values of earlier context rows.

        Returns:
            `BaseModelOutput`: `last_hidden_state` `(R, Q, D)`, normalised, ready for the LM head.
        """
        position_embeddings = self.rotary_emb(noise_embeds, position_ids)
        hidden_states = noise_embeds
        for layer in self.layers:
            hidden_states = layer(hidden_states, context_hidden_states, position_embeddings, attention_mask, cache)
        return BaseModelOutput(last_hidden_state=self.norm(hidden_states))

    # ---- loading and saving ----

    @classmethod
    def from_pretrained(
        cls,
        pretrained_model_name_or_path: str | os.PathLike | None,
        *model_args,
        config: DSparkConfig | str | os.PathLike | None = None,
        **kwargs,
    ):
        """Loads a drafter in any packaging that [`~hf_dspark.formats`] reads, and checks it.

        Args:
            pretrained_model_name_or_path (`str` or `os.PathLike`): local folder or Hub repo id; `None` is passed on to
                the host, with the `config` and `state_dict` it then needs.
            config ([`DSparkConfig`], `str` or `os.PathLike`, *optional*): used instead of the checkpoint's own.
            kwargs: those of [`~transformers.PreTrainedModel.from_pretrained`]: `dtype` (default `"auto"`: that of the
                weights), `device_map`, `attn_implementation`, `revision`, `token`, `subfolder`, `variant`, …; and
                fields of [`DSparkConfig`] to change, if no `config` is given.

        Returns:
            [`DSparkDraftModel`], in evaluation mode, with the `load_profile` saved beside it; a tuple of it and the
            host's `dict` with `output_loading_info=True`.

        Raises:
            CheckpointError: the checkpoint is of no known packaging, damaged, or contradicts itself.
            ValueError: its `load_profile.json` cannot be used.
        """
        if pretrained_model_name_or_path is None:
            return super().from_pretrained(None, *model_args, config=config, **kwargs)
        if kwargs.pop("use_safetensors", None) is False:
            raise CheckpointError("`use_safetensors=False` asks for a pickle, which is never read. Leave it out.")
        download = {name: kwargs.pop(name) for name in DOWNLOAD_OPTIONS if name in kwargs}
        folder = find_folder(
            pretrained_model_name_or_path, check=packaging_of, subfolder=kwargs.pop("subfolder", ""), **download
        )
        overrides = {}
        if config is None:
            overrides = {name: kwargs.pop(name) for name in DRAFTER_FIELDS & kwargs.keys()}
        elif isinstance(config, (str, os.PathLike)):
            config = DSparkConfig.from_pretrained(config)
        variant, with_info = kwargs.pop("variant", None), kwargs.pop("output_loading_info", False)
        config, tensors, notes = read_checkpoint(folder, config=config, overrides=overrides, variant=variant)
        for note in notes:
            logger.warning(f"{folder}: {note}")

        with progress_bars_off():
            loaded: Any = super().from_pretrained(
                None, *model_args, config=config, state_dict=tensors, output_loading_info=True, **kwargs
            )
        model, info = loaded
        model.name_or_path = model.config.name_or_path = str(pretrained_model_name_or_path)
        model.folder = folder
        model._target_copies = find_target_copies(folder, variant)
        model.take_profile_of(folder)
        return (model, info) if with_info else model

    def save_pretrained(  # type: ignore[override]  # the host's further arguments are named ones, in kwargs
        self,
        save_directory: str | os.PathLike,
        is_main_process: bool = True,
        state_dict: dict[str, Tensor] | None = None,
        push_to_hub: bool = False,
        max_shard_size: int | str = "50GB",
        variant: str | None = None,
        **kwargs,
    ) -> None:
        """Saves configuration, weights and, if there is one, the load profile. The target's tensors are not among them.

        Beside them come three small files through which `AutoModel` and `generate(custom_generate=…)` find this package
        with `trust_remote_code=True`.

        Files are completed in a hidden folder and then moved into place, so a crash leaves no half-written one behind.
        Files of an earlier save that are no longer needed are removed.

        Args:
            save_directory (`str` or `os.PathLike`): folder to save to; made if it does not exist.
            is_main_process (`bool`, defaults to `True`): whether this process writes, in distributed training.
            state_dict (`dict[str, torch.Tensor]`, *optional*): tensors to save instead of the model's own.
            push_to_hub (`bool`, defaults to `False`): whether to upload the drafter afterwards.
            max_shard_size (`int` or `str`, defaults to `"50GB"`): bytes of a weight file from which it is split.
            variant (`str`, *optional*): the `fp16` of `model.fp16.safetensors`.
            kwargs: those of [`~transformers.PreTrainedModel.save_pretrained`] and, with `push_to_hub`, of
                [`~transformers.PreTrainedModel.push_to_hub`], whose `repo_id` defaults to the name of the folder.

        Raises:
            ValueError: `push_to_hub` together with `state_dict` or `variant`.
        """
        if push_to_hub and (state_dict is not None or variant):
            raise ValueError(
                "`push_to_hub` uploads the drafter's own weights as model.safetensors, not those of `state_dict` or `variant`. "
                "Save first, and upload the folder with `hf-dspark push`."
            )
        options = {"max_shard_size": max_shard_size, "variant": variant, **kwargs}
        if kwargs.get("distributed_checkpoint"):  # every process writes a part, and all to the same folder
            return super().save_pretrained(save_directory, is_main_process, state_dict, push_to_hub, **options)
        folder, repo_id = Path(save_directory), options.pop("repo_id", None)
        upload = {name: options.pop(name) for name in _UPLOAD_OPTIONS if name in options}
        self.config.auto_map = dict(AUTO_MAP)
        with progress_bars_off(), replaced_files(folder, variant) as staged:
            super().save_pretrained(staged, is_main_process, state_dict, **options)
            written = any(staged.iterdir())  # not where another process writes
            if written:
                write_code_files(staged)
            if written and self.saved_profile is not None:
                self.saved_profile.save(staged / LOAD_PROFILE_NAME)
        if push_to_hub and written:
            upload["max_shard_size"] = max_shard_size
            self.push_to_hub(repo_id or folder.resolve().name, **upload)  # type: ignore[arg-type]  # hidden by a wrapper

    def take_profile_of(self, folder: Path) -> None:
        """Takes the load profile of a drafter's folder, if there is one; `bind` sets it aside where it is of another machine.

        Args:
            folder (`Path`): of this drafter.

        Raises:
            ValueError: its `load_profile.json` cannot be used.
        """
        if (folder / LOAD_PROFILE_NAME).is_file():
            self.load_profile = self._profile_along = LoadProfile.load(folder / LOAD_PROFILE_NAME)

    @property
    def saved_profile(self) -> LoadProfile | None:
        """The load profile that is saved with the drafter: the one in use, or one of another machine that it came with."""
        return self.load_profile or self._profile_set_aside

    # ---- the target's embedding and LM head, by reference ----

    def bind(self, target: PreTrainedModel) -> None:
        """Uses `target`'s embedding and LM head. Called by `generate`; a second call with the same target does nothing, unless
        it has been moved to another device or dtype.

        Args:
            target (`PreTrainedModel`): a decoder-only causal language model.

        Raises:
            ValueError: the pair does not fit: vocabulary, hidden size or number of layers differ, or an embedding kept in the
                drafter's file is not the target's.
        """
        if self._target is None or self._target.model() is not target or self._target.moved:
            bound = _BoundTarget(target, self)
            if self._target_copies is not None:
                self._target_copies.compare(target, self.draft_token_ids)
            # Not a submodule: neither state_dict nor .to() must ever reach the target through the drafter.
            object.__setattr__(self, "_target", bound)
            self._set_aside_foreign_profile(target)

    def _set_aside_foreign_profile(self, target: PreTrainedModel) -> None:
        """A profile that only came along with the checkpoint must be of this machine and target; one that was set need not."""
        profile = self.load_profile
        if profile is None or profile is not self._profile_along or not (differences := profile.differences(target)):
            return
        self.load_profile, self._profile_set_aside = None, profile
        logger.warning(
            "The load profile that came with the drafter was measured on something else and is not used: "
            + "; ".join(f"{name} {there!r} there, {here!r} here" for name, (there, here) in differences.items())
            + ". Measure with `drafter.load_profile = LoadProfile.measure(target, drafter)`, or ask for it: "
            "`drafter.load_profile = LoadProfile.load(path)`, with `.live()` behind it to let the rounds correct it."
        )

    @property
    def bound_target(self) -> _BoundTarget:
        """The bound embedding and head.

        Raises:
            RuntimeError: `bind` has not been called.
        """
        if self._target is None:
            raise RuntimeError(
                "this drafter is not bound to a target: pass it to `target.generate(..., assistant_model=drafter)`, or call "
                "`drafter.bind(target)` first."
            )
        return self._target

    def embed(self, input_ids: Tensor) -> Tensor:
        """Embeddings as the target's embedding layer makes them; what its forward does to them afterwards is not in.

        Args:
            input_ids (`torch.LongTensor` of shape `(R, Q)`): tokens of the target's vocabulary.

        Returns:
            `torch.Tensor` of shape `(R, Q, D)`, on the drafter's device and in its dtype.
        """
        return self.bound_target.embed(input_ids).to(self.device, self.dtype)

    def base_logits(self, hidden_states: Tensor) -> Tensor:
        """U: the target's LM head on draft states.

        Args:
            hidden_states (`torch.Tensor` of shape `(..., D)`): from `forward`.

        Returns:
            `torch.FloatTensor` of shape `(..., draft_logits_size)`.
        """
        return self.bound_target.base_logits(hidden_states)

    @property
    def draft_token_ids(self) -> Tensor | None:
        """Target token of each draft token, `(draft_vocab_size,)`; `None` when the vocabulary is not reduced."""
        if self.config.draft_vocab_size is None:
            return None
        return torch.arange(self.config.draft_vocab_size, device=self.d2t.device) + self.d2t

    def set_draft_vocabulary(self, token_ids: Tensor) -> None:
        """Chooses the reduced vocabulary.

        Args:
            token_ids (`torch.LongTensor` of shape `(draft_vocab_size,)`): target tokens, strictly increasing.

        Raises:
            ValueError: the drafter has no reduced vocabulary, or the ids are unsorted, repeated or out of range.
        """
        size = self.config.draft_vocab_size
        if size is None:
            raise ValueError("set_draft_vocabulary: the configuration has no `draft_vocab_size`; set one first.")
        ascending = token_ids.shape == (size,) and bool((token_ids.diff() > 0).all())
        if not ascending or int(token_ids[0]) < 0 or int(token_ids[-1]) >= self.config.vocab_size:
            raise ValueError(
                f"set_draft_vocabulary: expected {size} strictly increasing token ids below {self.config.vocab_size}, got a "
                f"tensor of shape {tuple(token_ids.shape)}."
            )
        token_ids = token_ids.to(self.d2t.device)
        self.d2t.copy_(token_ids - torch.arange(size, device=token_ids.device))
        self.t2d.zero_()
        self.t2d[token_ids] = True
        object.__setattr__(self, "_target", None)  # its rows of the head were those of the old vocabulary

    def calibrated(self, confidence_logits: Tensor, greedy: bool = False, log_odds: Tensor | None = None) -> Tensor:
        """Confidences from the logits of the confidence head.

        Args:
            confidence_logits (`torch.Tensor` of shape `(..., L)`): of the first L positions.
            greedy (`bool`, defaults to `False`): whether the drafts will be held against the target's first choices.
            log_odds (`torch.Tensor` of shape `(..., L)`, *optional*): o_k of the drafted tokens; needed where the
                calibration weighs them.

        Returns:
            `torch.Tensor` of shape `(..., L)`: c_k = σ(logit_k / temperature_k + weight_k · o_k + offset_k).

        Raises:
            ValueError: the calibration weighs log-odds, and none are given.
        """
        temperatures, offsets, weights = self.config.calibration(greedy)
        length = confidence_logits.shape[-1]
        if temperatures is not None:
            confidence_logits = confidence_logits / confidence_logits.new_tensor(temperatures[:length])
        if offsets is not None:
            confidence_logits = confidence_logits + confidence_logits.new_tensor(offsets[:length])
        if weights is not None:
            if log_odds is None:
                raise ValueError(
                    "this drafter's greedy calibration weighs the log-odds of the drafted tokens: pass `log_odds`."
                )
            confidence_logits = confidence_logits + confidence_logits.new_tensor(weights[:length]) * log_odds
        return confidence_logits.sigmoid()


class _BoundTarget:
    """References into a target: embedding, LM head, and what the target does to logits behind its head."""

    def __init__(self, target: PreTrainedModel, drafter: DSparkDraftModel):
        config = target.config.get_text_config(decoder=True)
        _check_pair(target, drafter.config)
        self.model = weakref.ref(target)
        self.embedding = target.get_input_embeddings()
        self.head = target.get_output_embeddings()
        self.width = _width(self.embedding)
        self.softcap: float | None = getattr(config, "final_logit_softcapping", None)
        self.scale = getattr(config, "logit_scale", None) or 1 / (getattr(config, "logits_scaling", None) or 1)
        token_ids = drafter.draft_token_ids
        # The rows that a reduced vocabulary needs, in one piece: the only copy, of Vd x D.
        self.row_head: Any = None
        if token_ids is not None:
            rows = self._rows(token_ids, config.vocab_size, target.dtype)
            self.row_head = nn.Linear(rows.shape[1], rows.shape[0], bias=False, device="meta")
            self.row_head.weight = nn.Parameter(rows, requires_grad=False)
            if getattr(self.head, "bias", None) is not None:
                self.row_head.bias = nn.Parameter(self._at(token_ids, rows.new_zeros(1, self.width))[0], requires_grad=False)
            if is_packed(drafter) and rows.dtype == torch.float32 and rows.device.type == "cpu":  # like the drafter itself
                self.row_head = PackedLinear(self.row_head, drafter.config.num_draft_tokens)

    @property
    def moved(self) -> bool:
        """Whether the target has changed device or dtype, which the rows taken from its head did not follow."""
        theirs = self.head.weight
        if self.row_head is None or theirs.is_meta or not _is_plain(theirs):
            return False
        mine = self.row_head.weight
        return (mine.device, mine.dtype) != (theirs.device, theirs.dtype)

    @torch.no_grad()
    def _rows(self, token_ids: Tensor, vocab_size: int, dtype: torch.dtype) -> Tensor:
        """Rows of the head, `(Vd, D)`, as it uses them itself."""
        weight = self.head.weight.detach()
        if type(weight) is Tensor and _is_plain(weight) and not weight.is_meta and len(weight) == vocab_size:
            return weight[token_ids.to(weight.device)]
        # Quantised, offloaded or split over processes: the head answers unit vectors with its columns, and its bias.
        units = torch.eye(self.width, dtype=dtype, device=token_ids.device)
        columns = torch.cat([self._at(token_ids, some) for some in units.split(256)])
        if getattr(self.head, "bias", None) is not None:
            columns = columns - self._at(token_ids, torch.zeros_like(units[:1]))
        return columns.T.contiguous()

    @torch.no_grad()
    def _at(self, token_ids: Tensor, states: Tensor) -> Tensor:
        """What the head says of some tokens, `(..., D)` to `(..., Vd)`."""
        answers = self._run(self.head, states)
        return answers[..., token_ids.to(answers.device)]

    @staticmethod
    def _run(module: Any, inputs: Tensor) -> Tensor:
        """Output of the target's embedding or head, for inputs from any device and in any dtype."""
        weight = module.weight
        if not weight.is_meta:  # an offloaded module moves its inputs itself
            inputs = inputs.to(weight.device)
        if inputs.is_floating_point() and _is_plain(weight):  # a quantised one casts them itself
            inputs = inputs.to(weight.dtype)
        return module(inputs)

    def embed(self, input_ids: Tensor) -> Tensor:
        """Embeddings `(..., D)` as the target's embedding layer makes them."""
        return self._run(self.embedding, input_ids)

    def base_logits(self, hidden_states: Tensor) -> Tensor:
        """Logits of the draft vocabulary, `(..., D)` to `(..., Vd)`, float32."""
        if self.row_head is None:
            return self.full_logits(hidden_states)
        return self._finish(self._run(self.row_head, hidden_states)).to(hidden_states.device)

    def full_logits(self, hidden_states: Tensor) -> Tensor:
        """Logits of the target's whole vocabulary, `(..., D)` to `(..., V)`, float32."""
        return self._finish(self._run(self.head, hidden_states)).to(hidden_states.device)

    def _finish(self, logits: Tensor) -> Tensor:
        """What the target does behind its head; the Markov bias comes after it."""
        logits = logits.float()
        if self.scale != 1:
            logits = logits * self.scale
        if self.softcap is not None:
            logits = torch.tanh(logits / self.softcap) * self.softcap
        return logits


def _check_pair(target: PreTrainedModel, draft_config: DSparkConfig) -> None:
    """Raises ValueError where drafter and target cannot belong together."""
    config = target.config.get_text_config(decoder=True)
    if target.config.is_encoder_decoder:
        raise ValueError("DSpark drafts for decoder-only targets; this target is an encoder-decoder model.")
    if target.get_output_embeddings() is None:
        raise ValueError(
            f"the target ({type(target).__name__}) has no LM head (`get_output_embeddings()` is None); load it as "
            "AutoModelForCausalLM."
        )
    for name, expected, found in (
        ("vocab_size", draft_config.vocab_size, config.vocab_size),
        ("target_hidden_size", draft_config.target_hidden_size, config.hidden_size),
        ("hidden_size", draft_config.hidden_size, _width(target.get_input_embeddings())),
        ("num_target_layers", draft_config.num_target_layers, config.num_hidden_layers),
        (
            "final_logit_softcapping",
            draft_config.final_logit_softcapping,
            getattr(config, "final_logit_softcapping", None),
        ),
    ):
        if expected is not None and expected != found:
            raise ValueError(
                f"this drafter does not belong to this target: `{name}` of the drafter is {expected}, the target's is "
                f"{found}. Load the drafter that was trained for this target."
            )
    if draft_config.target_layer_ids[-1] >= config.num_hidden_layers - 1:  # a packaging may not say how many there are
        raise ValueError(
            f"this drafter does not belong to this target: `target_layer_ids` {draft_config.target_layer_ids} must lie below "
            f"{config.num_hidden_layers - 1}, the target's last layer. Load the drafter that was trained for this target."
        )
    if draft_config.mask_token_id >= config.vocab_size:
        raise ValueError(
            f"this drafter does not belong to this target: `mask_token_id` {draft_config.mask_token_id} is not below its "
            f"`vocab_size` {config.vocab_size}. Load the drafter that was trained for this target."
        )


def _is_plain(weight: Tensor) -> bool:
    return weight.is_floating_point() and weight.element_size() > 1


def _width(embedding: Any) -> int:
    return embedding.weight.shape[-1]
