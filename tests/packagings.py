"""Tiny checkpoints to read: a target, drafters for it, a builder per packaging, and means to damage what was built.

The builders write from the description of each packaging, not by the library, so that reader and writer cannot share a
mistake.
"""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import Gemma4ForCausalLM, Gemma4TextConfig, Qwen3Config, Qwen3ForCausalLM

from hf_dspark import DSparkConfig, DSparkDraftModel

VOCABULARY, HIDDEN, BLOCK, MASK = 61, 32, 4, 60
PARALLEL = dict(markov_rank=0, enable_confidence_head=False, sample_from_anchor=False)
GEMMA4 = dict(
    backbone_type="gemma4", attention_k_eq_v=True, num_key_value_heads=1, head_dim=16, hidden_act="gelu_pytorch_tanh",
    final_logit_softcapping=3.0,
    rope_parameters={"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
)  # fmt: skip


def make_config(**changes) -> DSparkConfig:
    fields = dict(
        vocab_size=VOCABULARY, hidden_size=HIDDEN, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=128, block_size=BLOCK, mask_token_id=MASK,
        target_layer_ids=[0, 2], num_target_layers=4, markov_rank=6, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    return DSparkConfig(**(fields | changes))


def make_drafter(dtype: torch.dtype = torch.float32, **changes) -> DSparkDraftModel:
    """A drafter whose every weight is random, the norms included: a new one would be refused as untrained."""
    torch.manual_seed(0)
    drafter = DSparkDraftModel(make_config(**changes)).eval()
    with torch.no_grad():
        for name, tensor in drafter.state_dict().items():
            if name not in ("d2t", "t2d"):
                tensor.add_(torch.randn_like(tensor) * 0.1)
    if drafter.config.draft_vocab_size is not None:
        drafter.set_draft_vocabulary(torch.arange(0, 3 * drafter.config.draft_vocab_size, 3))
    return drafter.to(dtype)


def file_names(folder: Path) -> list[str]:
    """Every file of a folder and of those inside it, in order."""
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def make_target() -> Qwen3ForCausalLM:
    """A Qwen3 of four layers, for the drafters of [`make_config`]."""
    torch.manual_seed(1)
    config = Qwen3Config(
        vocab_size=VOCABULARY, hidden_size=HIDDEN, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=128, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    return Qwen3ForCausalLM(config).eval()


def make_gemma4_target(**changes) -> Gemma4ForCausalLM:
    """A Gemma4 of four layers, two of them sliding, for drafters of [`GEMMA4`]; its cap is low enough to bend its logits."""
    torch.manual_seed(1)
    fields = dict(
        vocab_size=VOCABULARY, hidden_size=HIDDEN, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, global_head_dim=16, num_global_key_value_heads=1, attention_k_eq_v=True,
        hidden_size_per_layer_input=0, sliding_window=8, layer_types=["sliding_attention", "full_attention"] * 2,
        final_logit_softcapping=3.0, max_position_embeddings=128, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    target = Gemma4ForCausalLM(Gemma4TextConfig(**(fields | changes))).eval()
    with torch.no_grad():
        for name, tensor in target.state_dict().items():
            tensor.normal_(std=0.5) if name.endswith("embed_tokens.weight") else tensor.add_(torch.randn_like(tensor) * 0.1)
    return target


def write_deepspec(folder: Path, drafter: DSparkDraftModel, target: Qwen3ForCausalLM, **changes) -> Path:
    """Packs a drafter as DeepSpec does: drafter keys on top of the target's configuration, and the target's tensors."""
    config = drafter.config
    described = target.config.to_dict() | {
        "architectures": ["Qwen3DSparkModel"],
        "dtype": str(drafter.dtype).removeprefix("torch."),
        "num_hidden_layers": config.num_hidden_layers,
        "layer_types": ["full_attention"] * config.num_hidden_layers,
        "max_window_layers": 28,
        "num_anchors": 512,
        "num_target_layers": config.num_target_layers,
        "tie_word_embeddings": False,
        "use_sliding_window": False,
    }
    for name in (
        "block_size", "mask_token_id", "target_layer_ids", "markov_rank", "markov_head_type", "enable_confidence_head",
        "confidence_head_with_markov", "intermediate_size",
    ):  # fmt: skip
        described[name] = getattr(config, name)
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(described | changes, indent=2))
    save_file(drafter.state_dict() | _copies(drafter, target), folder / "model.safetensors")
    return folder


def _copies(drafter: DSparkDraftModel, target) -> dict[str, torch.Tensor]:
    """What DeepSpec keeps of the target; tied tensors are written twice."""
    return {
        "embed_tokens.weight": target.get_input_embeddings().weight.detach().to(drafter.dtype),
        "lm_head.weight": target.get_output_embeddings().weight.detach().to(drafter.dtype).clone(),
    }


def write_gemma4(folder: Path, drafter: DSparkDraftModel, target: Gemma4ForCausalLM, **changes) -> Path:
    """Packs a drafter as DeepSpec does for Gemma4: as above, in the words of a Gemma4 configuration."""
    config, shared = drafter.config, drafter.config.attention_k_eq_v
    described = {
        "architectures": ["Gemma4DSparkModel"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "attention_k_eq_v": shared,
        "dtype": str(drafter.dtype).removeprefix("torch."),
        "enable_moe_block": False,
        "final_logit_softcapping": config.final_logit_softcapping,
        "global_head_dim": config.head_dim,
        "head_dim": 8,
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size_per_layer_input": 0,
        "layer_types": ["full_attention"] * config.num_hidden_layers,
        "model_type": "gemma4_text",
        "num_anchors": 512,
        "num_global_key_value_heads": config.num_key_value_heads if shared else 1,
        "num_key_value_heads": 2 if shared else config.num_key_value_heads,
        "rope_parameters": {
            "full_attention": {"partial_rotary_factor": 0.25, "rope_theta": 1000000.0, "rope_type": "proportional"},
            "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"},
            "rope_theta": None,  # strays, as some files have them
            "rope_type": "default",
        },
        "sliding_window": 8,
        "tie_word_embeddings": False,
        "use_bidirectional_attention": None,
        "use_double_wide_mlp": False,
    }
    for name in (
        "block_size", "bos_token_id", "confidence_head_with_markov", "enable_confidence_head", "eos_token_id", "hidden_size",
        "initializer_range", "intermediate_size", "markov_head_type", "markov_rank", "mask_token_id",
        "max_position_embeddings", "num_attention_heads", "num_hidden_layers", "num_target_layers", "pad_token_id",
        "rms_norm_eps", "target_layer_ids", "vocab_size",
    ):  # fmt: skip
        described[name] = getattr(config, name)
    return _write(folder, described | changes, drafter.state_dict() | _copies(drafter, target))


def describe_layers(config: DSparkConfig) -> dict:
    """A drafter's layers in the words of transformers 4, as most of the published files have them."""
    described = {
        name: getattr(config, name)
        for name in (
            "attention_bias", "attention_dropout", "bos_token_id", "eos_token_id", "head_dim", "hidden_act", "hidden_size",
            "initializer_range", "intermediate_size", "max_position_embeddings", "num_attention_heads", "num_hidden_layers",
            "num_key_value_heads", "pad_token_id", "rms_norm_eps", "sliding_window", "vocab_size",
        )
    }  # fmt: skip
    return described | {
        "layer_types": ["sliding_attention" if config.sliding_window else "full_attention"] * config.num_hidden_layers,
        "max_window_layers": 5,
        "model_type": "qwen3",
        "rope_scaling": None,
        "rope_theta": config.rope_parameters["rope_theta"],
        "tie_word_embeddings": False,
        "use_cache": True,
    }


def _write(folder: Path, described: dict, tensors: dict[str, torch.Tensor]) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({name: value for name, value in described.items() if value is not ...}))
    save_file(tensors, folder / "model.safetensors")
    return folder


def write_speculators(folder: Path, drafter: DSparkDraftModel, target: Qwen3ForCausalLM, **changes) -> Path:
    """Packs a drafter as speculators 0.9 does. A reduced vocabulary brings `d2t`, `t2d` and the LM head's rows."""
    config = drafter.config
    described = {
        "architectures": ["DSparkSpeculator"],
        "auto_map": {"": "config.DSparkSpeculatorConfig"},
        "aux_hidden_state_layer_ids": [layer + 1 for layer in config.target_layer_ids],
        "block_size": config.block_size,
        "draft_vocab_size": config.draft_vocab_size or config.vocab_size,
        "mask_token_id": config.mask_token_id,
        "sample_from_anchor": config.sample_from_anchor,
        "sliding_window_non_causal": config.sliding_window is not None,
        "speculators_config": {
            "algorithm": "dspark",
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {
                    "proposal_type": "greedy",
                    "speculative_tokens": config.block_size - (0 if config.sample_from_anchor else 1),
                    "verifier_accept_k": 1,
                }
            ],
            "verifier": {"architectures": ["Qwen3ForCausalLM"], "name_or_path": "someone/target"},
        },
        "speculators_model_type": "dspark",
        "speculators_version": "0.9.0",
        "target_hidden_size": None,
        "transformer_layer_config": describe_layers(config),
    }
    for name in ("markov_rank", "markov_head_type", "enable_confidence_head", "confidence_head_with_markov"):
        described[name] = getattr(config, name)
    tensors = dict(drafter.state_dict())
    if config.draft_vocab_size is not None:
        marked = tensors["t2d"].nonzero().flatten()
        tensors["lm_head.weight"] = target.lm_head.weight.detach()[marked]
        tensors["d2t"] = (marked - torch.arange(len(marked))).to(torch.int32)
    return _write(folder, described | changes, tensors)


def write_dflash(folder: Path, drafter: DSparkDraftModel, **changes) -> Path:
    """Packs a drafter as z-lab does: no heads, bonus anchor, nothing of the target."""
    config = drafter.config
    described = describe_layers(config) | {
        "architectures": ["DFlashDraftModel"],
        "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
        "block_size": config.block_size,
        "dflash_config": {"mask_token_id": config.mask_token_id, "target_layer_ids": config.target_layer_ids},
        "num_target_layers": config.num_target_layers,
    }
    return _write(folder, described | changes, drafter.state_dict())


def write_specforge(folder: Path, drafter: DSparkDraftModel, **changes) -> Path:
    """Packs a drafter as SpecForge does: the drafter's keys in `dflash_config`."""
    config = drafter.config
    nested = {"confidence_head_alpha": 1.0, "projector_type": "dspark"}
    for name in (
        "mask_token_id", "target_layer_ids", "markov_rank", "markov_head_type", "enable_confidence_head",
        "confidence_head_with_markov",
    ):  # fmt: skip
        nested[name] = getattr(config, name)
    described = describe_layers(config) | {
        "architectures": ["DSparkDraftModel"],
        "block_size": config.block_size,
        "dflash_config": {name: value for name, value in (nested | changes.pop("nested", {})).items() if value is not ...},
        "num_target_layers": config.num_target_layers,
    }
    return _write(folder, described | changes, drafter.state_dict())


def write_modelopt(folder: Path, drafter: DSparkDraftModel, **changes) -> Path:
    """Packs a drafter as Model-Optimizer does: SpecForge's keys, `shift_label`, and the heads' tensors flat."""
    nested = {
        "shift_label": drafter.config.sample_from_anchor,
        "use_confidence_head": drafter.config.enable_confidence_head,
        "enable_confidence_head": ...,
        "causal": False,
    }
    write_specforge(folder, drafter, nested=nested | changes.pop("nested", {}), **changes)
    tensors = load_file(folder / "model.safetensors")
    for name in ("markov_w1.weight", "markov_w2.weight"):
        tensors[name] = tensors.pop(f"markov_head.{name}")
    for name in ("weight", "bias"):
        tensors[f"confidence_proj.{name}"] = tensors.pop(f"confidence_head.proj.{name}")
    save_file(tensors, folder / "model.safetensors")
    return folder


def write_muse_glimmer(folder: Path, drafter: DSparkDraftModel, **changes) -> Path:
    """Packs a drafter as `muse_glimmer_assistant`, whose writer knows neither vocabulary nor layers of the target."""
    config = drafter.config
    described = {
        "architectures": ["MuseGlimmerAssistantModel"],
        "block_size": config.block_size,
        "layer_types": ["sliding_attention"] * config.num_hidden_layers,
        "mask_token_id": config.mask_token_id,
        "model_type": "muse_glimmer_assistant",
        "rope_parameters": dict(config.rope_parameters),
        "target_layer_ids": config.target_layer_ids,
    }
    for name in (
        "attention_bias", "attention_dropout", "bos_token_id", "eos_token_id", "head_dim", "hidden_act", "hidden_size",
        "initializer_range", "intermediate_size", "max_position_embeddings", "num_attention_heads", "num_hidden_layers",
        "num_key_value_heads", "pad_token_id", "rms_norm_eps", "sliding_window",
    ):  # fmt: skip
        described[name] = getattr(config, name)
    tensors = drafter.state_dict()
    for theirs, ours in (("encoder.fc", "fc"), ("encoder.output_norm_enc", "hidden_norm")):
        tensors[f"{theirs}.weight"] = tensors.pop(f"{ours}.weight")
    return _write(folder, described | changes, tensors)


def write_own(folder: Path, drafter: DSparkDraftModel) -> Path:
    drafter.save_pretrained(folder)
    return folder


def build(packaging: str, folder: Path, **changes) -> Path:
    """A sound checkpoint in a packaging: its writer with a drafter, and a target, that suit it."""
    if packaging in ("own", "specforge", "modelopt"):
        write = {"own": write_own, "specforge": write_specforge, "modelopt": write_modelopt}[packaging]
        return write(folder, make_drafter(**changes))
    if packaging in ("dflash", "muse_glimmer"):
        write = {"dflash": write_dflash, "muse_glimmer": write_muse_glimmer}[packaging]
        window = dict(sliding_window=5) if packaging == "muse_glimmer" else {}
        return write(folder, make_drafter(**PARALLEL | window | changes))
    if packaging == "gemma4":
        return write_gemma4(folder, make_drafter(**GEMMA4 | changes), make_gemma4_target())
    reduced = dict(draft_vocab_size=20) if packaging == "reduced" else {}
    write = write_deepspec if packaging == "deepspec" else write_speculators
    return write(folder, make_drafter(**reduced | changes), make_target())


PACKAGINGS = (
    "own", "deepspec", "gemma4", "speculators", "reduced", "specforge", "modelopt", "dflash", "muse_glimmer",
)  # fmt: skip


def edit_config(folder: Path, **changes) -> None:
    path = folder / "config.json"
    content = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({name: value for name, value in content.items() if value is not ...}))


def edit_tensors(folder: Path, **changes) -> None:
    """Replaces tensors, named with `__` for the dots; `None` drops one, a function changes one."""
    tensors = {name: tensor.clone() for name, tensor in load_file(folder / "model.safetensors").items()}
    for name, change in changes.items():
        name = name.replace("__", ".")
        tensor = change(tensors[name]) if callable(change) else change
        if tensor is None:
            del tensors[name]
        else:
            tensors[name] = tensor.contiguous()
    save_file(tensors, folder / "model.safetensors")


@torch.no_grad()
def draft(drafter, target, prompt=(5, 9, 11, 3), tokens=(7, 3, 4, 5)) -> list[torch.Tensor]:
    """States, base logits, Markov bias and confidence of one block, given the tokens before each of its slots."""
    drafter.bind(target)
    config = drafter.config
    states = target(torch.tensor([prompt]), output_hidden_states=True).hidden_states
    context = drafter.project_context(torch.cat([states[layer + 1] for layer in config.target_layer_ids], dim=-1))
    block = torch.tensor([[tokens[0]] + [config.mask_token_id] * (config.block_size - 1)])
    positions = torch.arange(len(prompt) + config.block_size)[None]
    hidden = drafter(drafter.embed(block), context, positions).last_hidden_state
    results, embeddings = [hidden, drafter.base_logits(hidden)], None
    if drafter.markov_head is not None:
        embeddings = drafter.markov_head.markov_w1(torch.tensor([tokens]))
        results.append(drafter.markov_head.markov_w2(drafter.markov_head(embeddings, hidden)))
    if drafter.confidence_head is not None:
        results.append(drafter.confidence_head(hidden, embeddings))
    return results


def assert_same(left: list[torch.Tensor], right: list[torch.Tensor]) -> None:
    assert len(left) == len(right)
    for a, b in zip(left, right, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-6)  # the last bits depend on where in memory a weight lies
