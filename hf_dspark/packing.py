"""Linear layers with pre-packed weights, for processors.

A float32 `nn.Linear` on a few rows spends much of its time rearranging the weight for the matrix kernel, on every call.
oneDNN can keep the rearranged copy, which is what `torch.compile` with inductor's freezing does. On two cores this
makes a step of one token about a fifth faster and one of eight tokens a third, so the price of verifying a block falls
more than the price of the plain step it replaces. Results differ from `nn.Linear` in the last float32 bits: compare
like with like.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class PackedLinear(nn.Module):
    """Stand-in for a float32 `nn.Linear` on the processor whose weight no longer changes.

    The weight stays shared with the layer it stands for: tied embeddings keep working, and what is saved is the same.
    The packed copy is made beside it, so the layer's memory doubles; a weight changed or loaded later does not reach
    it.

    Args:
        linear (`nn.Linear`): the layer to stand in for.
        rows (`int`, defaults to 8): number of rows the packing is optimised for; any number is accepted.
    """

    def __init__(self, linear: nn.Linear, rows: int = 8):
        super().__init__()
        self.weight, self.bias = linear.weight, linear.bias
        self.in_features, self.out_features = linear.in_features, linear.out_features
        packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), rows)
        object.__setattr__(self, "_packed", packed)  # an opaque tensor: not a parameter, never saved

    def forward(self, inputs: Tensor) -> Tensor:
        moved = self.weight.dtype != torch.float32 or self.weight.device.type != "cpu"
        # The packed kernel has no derivative, and is for no other dtype or device.
        if moved or torch.is_autocast_enabled("cpu") or (torch.is_grad_enabled() and inputs.requires_grad):
            return F.linear(inputs, self.weight, self.bias)
        return torch.ops.mkldnn._linear_pointwise(inputs, self._packed, self.bias, "none", [], "")


def is_packed(model: nn.Module) -> bool:
    """Whether [`pack_linears`] has replaced layers of a model."""
    return any(isinstance(module, PackedLinear) for module in model.modules())


def pack_linears(model: nn.Module, rows: int = 8) -> nn.Module:
    """Replaces every float32 `nn.Linear` of `model` on the processor by its packed form, in place.

    Args:
        model (`nn.Module`): a model used for inference only: its weights must not change any more.
        rows (`int`, defaults to 8): number of tokens per forward to optimise for.

    Returns:
        `nn.Module`: the same model.

    Raises:
        RuntimeError: this build of PyTorch has no oneDNN.
        ValueError: the model holds no float32 linear layer on the processor.
    """
    if not torch.backends.mkldnn.is_available():
        raise RuntimeError(
            "pack_linears needs a PyTorch build with oneDNN (torch.backends.mkldnn); this one has none. Leave the "
            "model as it is."
        )
    replaced = 0
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear and child.weight.dtype == torch.float32 and child.weight.device.type == "cpu":
                setattr(parent, name, PackedLinear(child, rows))
                replaced += 1
    if not replaced:
        raise ValueError(
            "pack_linears found no float32 nn.Linear on the processor in this model; load the target with "
            "dtype=torch.float32 on the CPU, or leave it as it is: other devices and dtypes do not need this."
        )
    return model
