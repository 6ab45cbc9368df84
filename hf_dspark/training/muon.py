"""Muon for the matrices, AdamW for the rest, in one optimizer that `transformers.Trainer` can checkpoint.

Muon (Jordan et al., 2024) replaces a matrix's momentum by the nearest orthogonal matrix, found by five Newton–Schulz
steps. `torch.optim.Muon` does those in bfloat16, which takes 40 s a step on processors without it; here they run in the
parameter's own precision, and the processes of a distributed run share the matrices among them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

# Quintic iteration of Jordan et al.: fastest growth of small singular values at a band around 1.
_COEFFICIENTS = (3.4445, -4.7750, 2.0315)


class MuonWithAdamW(torch.optim.Optimizer):
    """Muon on the parameters of groups with `use_muon`, AdamW on the others.

    In a distributed run every process must hold all parameters and the same gradients, as under `DistributedDataParallel`.

    Args:
        groups (iterable of `dict`): each with `params`, `lr` and `use_muon`.
        momentum (`float`, defaults to 0.95): momentum of Muon (Nesterov).
        betas (`tuple[float, float]`, defaults to (0.9, 0.95)): of AdamW.
        weight_decay (`float`, defaults to 0.0): decoupled, for both.
    """

    def __init__(
        self,
        groups: Iterable[dict[str, Any]],
        momentum: float = 0.95,
        betas: tuple[float, float] = (0.9, 0.95),
        weight_decay: float = 0.0,
    ):
        super().__init__(groups, {"lr": 1e-3, "momentum": momentum, "betas": betas, "weight_decay": weight_decay, "eps": 1e-8})

    @torch.no_grad()
    def step(self, closure: Callable | None = None) -> None:
        """One update; `closure` is not supported, as in most of the library's optimizers under Trainer."""
        for group in self.param_groups:
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            for parameter in parameters:
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
            if group["use_muon"]:
                self._muon(parameters, group)
            else:
                for parameter in parameters:
                    self._adamw(parameter, group)

    def _muon(self, parameters: list[Tensor], group: dict[str, Any]) -> None:
        updates = []
        for parameter in parameters:
            state = self.state[parameter]
            if not state:
                state["momentum"] = torch.zeros_like(parameter)
            momentum = state["momentum"].lerp_(parameter.grad, 1 - group["momentum"])
            updates.append(parameter.grad.lerp(momentum, group["momentum"]))
        for parameter, update in zip(parameters, _orthogonalised(updates), strict=True):
            # A tall matrix gets a larger step, so that every input direction moves alike (Jordan et al.).
            scale = max(1.0, parameter.shape[0] / parameter.shape[1]) ** 0.5
            parameter.add_(update, alpha=-group["lr"] * scale)

    def _adamw(self, parameter: Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if not state:
            state.update(step=0, mean=torch.zeros_like(parameter), square=torch.zeros_like(parameter))
        state["step"] += 1
        beta1, beta2 = group["betas"]
        state["mean"].lerp_(parameter.grad, 1 - beta1)
        state["square"].lerp_(parameter.grad.square(), 1 - beta2)
        bias1, bias2 = 1 - beta1 ** state["step"], 1 - beta2 ** state["step"]
        parameter.addcdiv_(state["mean"], (state["square"] / bias2).sqrt_().add_(group["eps"]), value=-group["lr"] / bias1)


def _orthogonalised(matrices: list[Tensor]) -> list[Tensor]:
    """[`orthogonalise`] of each; every process of a distributed run does its share and sends it to the others."""
    processes, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_available() and dist.is_initialized() else (1, 0)
    found = [
        orthogonalise(matrix).contiguous() if index % processes == rank else torch.empty_like(matrix)
        for index, matrix in enumerate(matrices)
    ]
    if processes > 1:
        for index, matrix in enumerate(found):
            dist.broadcast(matrix, src=index % processes)
    return found


def orthogonalise(matrix: Tensor, steps: int = 5) -> Tensor:
    """Nearest (semi-)orthogonal matrix, approximately.

    Singular values of at least a hundredth of the largest one end between about 0.68 and 1.2, smaller ones lower.

    Args:
        matrix (`torch.Tensor` of shape `(m, n)`): any scale.
        steps (`int`, defaults to 5): Newton–Schulz iterations.

    Returns:
        `torch.Tensor` of shape `(m, n)`.
    """
    a, b, c = _COEFFICIENTS
    tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.T if tall else matrix
    x = x / (x.norm() + 1e-7)
    for _ in range(steps):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.T if tall else x


def parameter_groups(model: nn.Module, learning_rate: float, muon_learning_rate: float) -> list[dict[str, Any]]:
    """Parameters for [`MuonWithAdamW`].

    Args:
        model ([`~hf_dspark.DSparkDraftModel`]): the drafter.
        learning_rate (`float`): of AdamW.
        muon_learning_rate (`float`): of Muon.

    Returns:
        `list[dict]`: a group for Muon, the matrices between hidden states, and one for AdamW: the tables of the sequential
            head (whose rows are tokens), the confidence head, norms and biases.
    """
    muon: list[nn.Parameter] = []
    adamw: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        hidden = parameter.ndim == 2 and not name.startswith(("markov_head.markov_w", "confidence_head"))
        (muon if hidden else adamw).append(parameter)
    return [
        {"params": muon, "lr": muon_learning_rate, "use_muon": True},
        {"params": adamw, "lr": learning_rate, "use_muon": False},
    ]
