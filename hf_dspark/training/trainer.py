"""Training a drafter with `transformers.Trainer` and the frozen target run on the fly.

The reference implementation first writes the target's hidden states of all training text to disk (38 TB for a 4B
target). Here the target runs inside the training step, without gradients, and its states are gone with the step; examples
that bring their states along (see [`~hf_dspark.training.state_cache`]) are taken at their word.
Everything around the loss (several processes, resuming, schedules, logging, uploading) is the host's Trainer.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    PreTrainedModel,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)

from ..cache import format_mask
from ..modeling_dspark import DSparkDraftModel
from ..packing import is_packed
from .blocks import block_visibility, build_blocks, sample_anchors
from .data import CACHED_STATES, LengthGroupedSampler, collate
from .loss import LossOutput, LossWeights, dspark_loss, slot_weights
from .muon import MuonWithAdamW, parameter_groups
from .state_cache import captured_states

_FEWEST_LOSSES = 8  # before any of them is called usual


@dataclass
class DSparkTrainingArguments(TrainingArguments):
    """`TrainingArguments` with the settings of a drafter.

    Args:
        num_anchors (`int`, defaults to 512): blocks per sequence and step.
        max_logit_positions (`int`, defaults to 1024): most positions whose vocabulary-sized logits exist at once. Peak
            memory of the loss is about six tensors of that many float32 rows of the vocabulary.
        optimizer (`str`, defaults to `"muon"`): `"muon"` (matrices by Muon, the rest by AdamW) or `"host"` for the one
            that `optim` names.
        muon_learning_rate (`float`, defaults to 0.01): step of Muon; `learning_rate` is that of AdamW.
        spike_factor (`float`, defaults to 4.0): a loss this many times the median of the latest ones stops the training;
            0 lets any finite loss pass.
        cross_entropy_weight, distance_weight, confidence_weight, loss_decay (`float`): see [`LossWeights`].
    """

    num_anchors: int = field(default=512, metadata={"help": "Blocks per sequence and step."})
    max_logit_positions: int = field(default=1024, metadata={"help": "Positions whose logits exist at once."})
    optimizer: str = field(default="muon", metadata={"help": "'muon' or 'host'."})
    muon_learning_rate: float = field(default=0.01, metadata={"help": "Learning rate of Muon."})
    spike_factor: float = field(default=4.0, metadata={"help": "Times the usual loss that stops the training; 0 for none."})
    cross_entropy_weight: float = field(default=0.1, metadata={"help": "Weight of the cross-entropy."})
    distance_weight: float = field(default=0.9, metadata={"help": "Weight of the L1 distance."})
    confidence_weight: float = field(default=1.0, metadata={"help": "Weight of the confidence loss."})
    loss_decay: float = field(default=4.0, metadata={"help": "Decay of the weight along a block."})

    def __post_init__(self):
        super().__post_init__()
        self.remove_unused_columns = False  # the columns are not arguments of the drafter's forward
        self.label_names = []
        if not torch.accelerator.is_available():  # there is nothing to pin for, and PyTorch would say so at every start
            self.dataloader_pin_memory = False
        if self.ddp_find_unused_parameters is None:
            # All parameters are used, but the heads outside of the wrapped forward: a search from there misses them.
            self.ddp_find_unused_parameters = False
        if self.optimizer not in ("muon", "host"):
            raise ValueError(f"`optimizer` must be 'muon' or 'host', got {self.optimizer!r}.")
        if not self.loss_decay > 0:
            raise ValueError(f"`loss_decay` must be above 0, got {self.loss_decay}.")
        if self.spike_factor != 0 and not self.spike_factor > 1:
            raise ValueError(f"`spike_factor` must be above 1, or 0 to let every loss pass, got {self.spike_factor}.")

    @property
    def loss_weights(self) -> LossWeights:
        """The four weights of the loss."""
        return LossWeights(self.cross_entropy_weight, self.distance_weight, self.confidence_weight, self.loss_decay)


def place_target(target: PreTrainedModel, args: TrainingArguments) -> None:
    """Moves a target to where this process trains."""
    if target.device != args.device:  # a quantised target is where it was loaded, and refuses to be moved
        target.to(args.device)  # type: ignore[arg-type]


class DSparkTrainer(Trainer):
    """Trains a [`DSparkDraftModel`] against a frozen target.

    Several processes that hold the whole drafter each (DDP) share one weighted mean, so they train as one process with
    the whole batch would. With gradient accumulation, each of the batches accumulated counts the same.

    Args:
        model ([`DSparkDraftModel`]): the drafter.
        target (`PreTrainedModel`): the target; moved to the training device and frozen (`requires_grad` is cleared).
        args ([`DSparkTrainingArguments`]): settings.
        kwargs: of `transformers.Trainer`; datasets hold the records of [`~hf_dspark.training.data.read_examples`].

    Raises:
        ValueError: the drafter's linear layers are packed.

    Attributes:
        trained_anchors (`int`): blocks that this process has trained on.
    """

    args: DSparkTrainingArguments

    def __init__(self, model: DSparkDraftModel, target: PreTrainedModel, args: DSparkTrainingArguments, **kwargs: Any):
        if is_packed(model):
            raise ValueError(
                "the linear layers of this drafter are packed (`pack_linears`, which `load_default` calls too), and packed "
                "copies do not follow their weights. Load the drafter anew with DSparkDraftModel.from_pretrained."
            )
        place_target(target, args)
        self.target = target.eval().requires_grad_(False)
        model.bind(self.target)
        self._confidence_trained = model.confidence_head is not None and args.confidence_weight > 0
        if model.confidence_head is not None:
            model.confidence_head.requires_grad_(self._confidence_trained)
        pad = next((t for t in (model.config.pad_token_id, model.config.mask_token_id) if t is not None), 0)
        kwargs.setdefault("data_collator", lambda examples: collate(examples, pad))
        super().__init__(model=model, args=args, **kwargs)
        if not args.fp16:  # whose loss scaling overshoots on purpose and skips such steps
            self.add_callback(_StopAtBadGradient)
        self._metrics: dict[str, Tensor] = {}
        self._latest_losses: deque[float] = deque(maxlen=50)
        self.trained_anchors = 0

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        if self.args.optimizer == "host":
            return super().create_optimizer()
        if self.optimizer is None:
            groups = parameter_groups(self.model, self.args.learning_rate, self.args.muon_learning_rate)
            self.optimizer = MuonWithAdamW(groups, weight_decay=self.args.weight_decay)
        return self.optimizer

    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        if self.args.train_sampling_strategy != "group_by_length":
            return super()._get_train_sampler(train_dataset)
        dataset = self.train_dataset if train_dataset is None else train_dataset
        seed = self.args.seed if self.args.data_seed is None else self.args.data_seed
        sampler = LengthGroupedSampler([len(example["input_ids"]) for example in dataset], self.args.train_batch_size, seed)
        self.remove_callback(_TellEpoch)  # of an earlier call
        self.add_callback(_TellEpoch(sampler))
        return sampler

    def compute_loss(
        self, model: nn.Module, inputs: dict[str, Tensor], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        output = self.block_loss(model, inputs)
        loss = output.loss.detach()
        if self.accelerator.num_processes > 1:  # a process' share may be large or small; all stop together, or none
            loss = self.accelerator.reduce(loss, reduction="mean")
        self._check(float(loss), inputs["input_ids"])
        return (output.loss, {}) if return_outputs else output.loss

    def _check(self, loss: float, input_ids: Tensor) -> None:
        """Stops before a loss that is not finite or far above the usual reaches the weights."""
        usual = median(self._latest_losses) if len(self._latest_losses) >= _FEWEST_LOSSES else math.inf
        spike = self.args.spike_factor and loss > self.args.spike_factor * usual
        if spike or not math.isfinite(loss):
            what = f", {loss / usual:.1f} times its usual {usual:.3g}," if spike and math.isfinite(loss) else ""
            raise FloatingPointError(
                f"the loss is {loss:.3g}{what} at step {self.state.global_step}, on a batch of {tuple(input_ids.shape)} tokens "
                f"that starts with {input_ids[0, :8].tolist()}. Lower the learning rate or train in float32"
                f"{' or, if such text is meant to be there, set `spike_factor` to 0' if what else ''}; the last checkpoint "
                "is untouched."
            )
        if loss > 0:  # a batch without a block says nothing
            self._latest_losses.append(loss)

    def block_loss(self, model: nn.Module, inputs: dict[str, Tensor]) -> LossOutput:
        """Target forward, draft forward over all blocks, and the loss of a batch.

        Args:
            model (`nn.Module`): the drafter, as the host has wrapped it.
            inputs (`dict[str, torch.Tensor]`): from [`~hf_dspark.training.data.collate`].

        Returns:
            [`LossOutput`]: the loss, and what is logged.
        """
        drafter: DSparkDraftModel = self.accelerator.unwrap_model(model)
        config, args = drafter.config, self.args
        input_ids, loss_mask = inputs["input_ids"], inputs["loss_mask"]
        batch, length = input_ids.shape
        anchors, keep = sample_anchors(loss_mask, args.num_anchors)
        blocks = build_blocks(
            input_ids, loss_mask, anchors, keep, config.block_size, config.mask_token_id, config.sample_from_anchor
        )
        if CACHED_STATES[0] in inputs:
            captured, last_states = (inputs[name] for name in CACHED_STATES)
        else:
            captured, last_states = captured_states(self.target, input_ids, inputs["attention_mask"], config.target_layer_ids)
        context = drafter.project_context(captured)
        visible = block_visibility(anchors, config.block_size, length, config.sliding_window)
        positions = torch.cat(
            [torch.arange(length, device=input_ids.device).expand(batch, -1), blocks.positions.flatten(1)], dim=1
        )
        hidden = model(
            noise_embeds=drafter.embed(blocks.inputs.flatten(1)),
            context_hidden_states=context,
            position_ids=positions,
            attention_mask=format_mask(visible, config._attn_implementation, drafter.dtype),
        ).last_hidden_state.view(*blocks.inputs.shape, -1)
        if not config.sample_from_anchor:
            hidden = hidden[:, :, 1:]

        kept = keep.flatten()
        rows = torch.arange(batch, device=input_ids.device)[:, None, None] * length
        supervised = blocks.supervised.flatten(0, 1)[kept]
        output = dspark_loss(
            drafter,
            hidden.flatten(0, 1)[kept],
            blocks.previous.flatten(0, 1)[kept],
            blocks.labels.flatten(0, 1)[kept],
            supervised,
            last_states.flatten(0, 1),
            (blocks.sources + rows).flatten(0, 1)[kept],
            args.loss_weights,
            args.max_logit_positions,
            self._common_normaliser(supervised),
        )
        for name, value in output.metrics.items():
            self._metrics[name] = self._metrics.get(name, 0) + value
        self._metrics["blocks"] = self._metrics.get("blocks", torch.zeros(())) + kept.sum().cpu()
        if model.training:
            self.trained_anchors += int(kept.sum())
        return output

    def _common_normaliser(self, supervised: Tensor) -> Tensor | None:
        """Σ w averaged over processes: the gradient average over processes is then the gradient of the whole batch."""
        if self.accelerator.num_processes == 1:
            return None
        return self.accelerator.reduce(slot_weights(supervised, self.args.loss_decay).sum(), reduction="mean")

    def prediction_step(self, model: nn.Module, inputs: dict[str, Tensor], *args: Any, **kwargs: Any) -> Any:
        with torch.no_grad():
            return self.block_loss(model, self._prepare_inputs(inputs)).loss.detach(), None, None

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        training_metrics, self._metrics = self._metrics, {}
        with torch.random.fork_rng(devices=[]):
            torch.random.default_generator.manual_seed(self.args.seed)  # the same anchors at every evaluation
            try:
                return super().evaluate(*args, **kwargs)
            finally:
                self._metrics = training_metrics

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Adds what the blocks since the last log would have been worth.

        `tau` is 1 + Σ_k of the mean survival ∏ c*: the accepted length of sampling on this text; `tau_greedy` counts
        agreement of first choices instead. `acceptance_k` is the mean c* at position k, `confidence_error` the mean
        |c_k − c*|, `confidence_bias` the mean c_k − c*; both only where confidences are trained.
        `anchors` are the blocks this process has trained on.
        """
        evaluating = any(key.startswith("eval_") for key in logs)
        if self._metrics and ("loss" in logs or evaluating):
            prefix = "eval_" if evaluating else ""
            sums = {name: self.accelerator.reduce(value.to(self.args.device)) for name, value in self._metrics.items()}
            count, blocks = sums["count"].clamp_min(1), sums["blocks"].clamp_min(1)
            logs[prefix + "tau"] = round(1 + float((sums["survive"] / blocks).sum()), 4)
            logs[prefix + "tau_greedy"] = round(1 + float((sums["agree_prefix"] / blocks).sum()), 4)
            for k, value in enumerate((sums["overlap"] / count).tolist(), start=1):
                logs[f"{prefix}acceptance_{k}"] = round(value, 4)
            if self._confidence_trained:
                logs[prefix + "confidence_error"] = round(float((sums["confidence_error"] / count).mean()), 4)
                logs[prefix + "confidence_bias"] = round(float(((sums["confidence"] - sums["overlap"]) / count).mean()), 4)
            self._metrics = {}
        logs["anchors"] = self.trained_anchors
        super().log(logs, *args, **kwargs)


class _TellEpoch(TrainerCallback):
    """Tells a sampler the epoch: the host does not reach it where several processes go on in the middle of one."""

    def __init__(self, sampler: LengthGroupedSampler):
        self.sampler = sampler

    def on_epoch_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self.sampler.set_epoch(int(state.epoch or 0))


class _StopAtBadGradient(TrainerCallback):
    """Stops before a gradient that is not finite reaches the weights, and with them the next checkpoint."""

    def on_pre_optimizer_step(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any):
        grads = [parameter.grad for parameter in kwargs["model"].parameters() if parameter.grad is not None]
        if not torch.isfinite(nn.utils.get_total_norm(grads)):
            raise FloatingPointError(
                f"a gradient is not finite at step {state.global_step}, though the loss is. Lower the learning rate or "
                "train in float32; the last checkpoint is untouched."
            )
