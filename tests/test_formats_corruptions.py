"""One thing wrong at a time, in every packaging: each is refused by a message that names what is wrong.

The damage of the first tables is done to every packaging that has the field or tensor, wherever it keeps it and whatever it
calls it; that of the last ones belongs to one packaging each.
"""

import copy
import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from packagings import PACKAGINGS, build, edit_tensors
from safetensors.torch import load_file, save_file
from tiny import one_thread  # noqa: F401

from hf_dspark import DSparkDraftModel
from hf_dspark.errors import CheckpointError

GONE = ...
# What a packaging calls a field or tensor; elsewhere it has our name.
CALLED = {
    "gemma4": {
        "head_dim": "global_head_dim",
        "hidden_act": "hidden_activation",
        "num_key_value_heads": "num_global_key_value_heads",
    },
    "speculators": {"target_layer_ids": "aux_hidden_state_layer_ids"},
    "reduced": {"target_layer_ids": "aux_hidden_state_layer_ids"},
    "modelopt": {
        "confidence_head.proj.bias": "confidence_proj.bias",
        "confidence_head.proj.weight": "confidence_proj.weight",
        "enable_confidence_head": "use_confidence_head",
        "markov_head.markov_w1.weight": "markov_w1.weight",
        "markov_head.markov_w2.weight": "markov_w2.weight",
    },
    "muse_glimmer": {"fc.weight": "encoder.fc.weight", "hidden_norm.weight": "encoder.output_norm_enc.weight"},
}
SHAPES = r"`[\w.]+` must have shape"

# Field, new value, and what the message must say; without that, the field's name.
FIELDS = [
    *((name, GONE) for name in (
        "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
        "hidden_act", "max_position_embeddings", "rms_norm_eps", "block_size", "mask_token_id", "target_layer_ids",
        "enable_confidence_head",
    )),
    *((name, value) for name in ("hidden_size", "num_attention_heads", "block_size") for value in ("4", None, 2.5, [4], 0, -4)),
    ("hidden_size", 64, SHAPES),
    ("intermediate_size", 47, r"`layers.0.mlp.\w+.weight` must have shape"),
    ("num_hidden_layers", 1),
    ("num_hidden_layers", 3),
    ("num_hidden_layers", 10**12, "`num_hidden_layers` is 1000000000000, but the weights hold 2"),
    ("num_attention_heads", 8, r"`layers.0.self_attn.\w+.weight` must have shape"),
    ("num_attention_heads", 10**9, r"`layers.0.self_attn.\w+.weight` must have shape"),
    ("num_key_value_heads", 4, r"`layers.0.self_attn.\w+.weight` must have shape"),
    ("num_key_value_heads", 3, r"`num_attention_heads` .* multiple of `num_key_value_heads`"),
    ("head_dim", 4, r"`layers.0.self_attn.\w+.weight` must have shape"),
    ("hidden_act", "magic"),
    ("max_position_embeddings", 0),
    ("rms_norm_eps", -1.0),
    ("rms_norm_eps", "1e-6"),
    ("attention_bias", True, "the weights lack `layers.0.self_attn"),
    ("attention_dropout", 2.0),
    ("block_size", 10**12),
    ("mask_token_id", "60"),
    ("mask_token_id", -1),
    ("mask_token_id", 0, "`mask_token_id` .* also the pad token"),
    ("mask_token_id", 1, "`mask_token_id` .* also the bos token"),
    ("mask_token_id", 2, "`mask_token_id` .* also the eos token"),
    ("eos_token_id", [2, 60], "`mask_token_id` .* also the eos token"),
    ("eos_token_id", "end"),
    ("target_layer_ids", [3, 1], "`target_layer_ids` must be a strictly increasing"),
    ("target_layer_ids", [1, 1], "`target_layer_ids` must be a strictly increasing"),
    ("target_layer_ids", [], "`target_layer_ids` must be a strictly increasing"),
    ("target_layer_ids", [0, "2"]),
    ("target_layer_ids", "02"),
    ("target_layer_ids", 2),
    ("target_layer_ids", [-3, 1], "_layer_ids` must (lie|be)"),
    ("target_layer_ids", [0, 1, 2], "`fc.weight` must have shape"),
    ("vocab_size", "61"),
    ("vocab_size", 60, "must lie .*`vocab_size`"),
    ("num_target_layers", 3),
    ("num_target_layers", 1),
    ("num_target_layers", "4"),
]  # fmt: skip
HEADS = [
    *((name, GONE) for name in ("markov_rank",)),
    ("markov_rank", 5, r"`markov_head.markov_w1.weight` must have shape"),
    ("markov_rank", 0, "`markov_rank` is 0 .* the weights also hold `markov_head"),
    ("markov_rank", -1),
    ("markov_rank", "6"),
    ("markov_head_type", "lstm"),
    ("markov_head_type", "gated", "`markov_head_type` 'gated', but the weights lack `markov_head.gate_proj"),
    ("markov_head_type", 3),
    ("enable_confidence_head", False),
    ("enable_confidence_head", "yes"),
    ("confidence_head_with_markov", False, "`confidence_head.proj.weight` must have shape"),
    ("confidence_head_with_markov", "no"),
    ("vocab_size", 62, rf"{SHAPES}|a `vocab_size` of 62, but"),
]


def nan(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.where(tensor != tensor.flatten()[0], float("nan"))


# Tensor, what becomes of it, and what the message must say; without that, the tensor's name.
TENSORS = [
    *((name, None) for name in (
        "fc.weight", "hidden_norm.weight", "norm.weight", "layers.1.self_attn.k_proj.weight", "layers.0.mlp.down_proj.weight",
        "layers.1.input_layernorm.weight", "layers.0.self_attn.q_norm.weight",
    )),
    ("fc.weight", lambda t: t.T, "`fc.weight` must have shape .* it is transposed"),
    ("fc.weight", nan, "`fc.weight` must be finite, got 1 "),
    ("fc.weight", lambda t: t * float("inf")),
    ("fc.weight", lambda t: t.to(torch.int8), "`fc.weight` must be stored as .*, got I8"),
    ("fc.weight", lambda t: t.to(torch.float8_e4m3fn), "`fc.weight` must be stored as .*, got F8_E4M3"),
    ("fc.weight", lambda t: torch.zeros(2**20)),
    ("hidden_norm.weight", nan),
    ("norm.weight", lambda t: t[1:]),
    ("layers.0.self_attn.k_proj.weight", lambda t: t.T),
    ("layers.1.self_attn.q_norm.weight", lambda t: t[:4]),
    ("layers.1.mlp.up_proj.weight", lambda t: t[:-1]),
    ("layers.0.mlp.down_proj.weight", nan),
    ("layers.0.mlp.gate_proj.bias", torch.zeros(48)),
    ("layers.7.input_layernorm.weight", torch.ones(32), "`num_hidden_layers` is 2, but the weights hold 3"),
    ("model.fc.weight", torch.ones(32, 64)),
    ("extra.weight", torch.ones(2)),
]  # fmt: skip
HEAD_TENSORS = [
    ("markov_head.markov_w1.weight", None),
    ("markov_head.markov_w2.weight", None),
    ("markov_head.markov_w1.weight", lambda t: t.T, "markov_w1.weight` must have shape .* it is transposed"),
    ("markov_head.markov_w2.weight", lambda t: t.T, "markov_w2.weight` must have shape .* it is transposed"),
    ("markov_head.markov_w1.weight", nan),
    ("markov_head.markov_w2.weight", lambda t: t[1:]),
    ("confidence_head.proj.weight", lambda t: t[:, :-1]),
    ("confidence_head.proj.weight", None),
    ("confidence_head.proj.bias", None),
    ("confidence_head.proj.bias", nan),
]
LAYERS = "transformer_layer_config"

# Of one packaging each. A field may be given with the object it lies in.
OWN_FIELDS = {
    "own": [
        *((name, GONE) for name in (
            "sample_from_anchor", "rope_parameters", "sliding_window", "confidence_head_with_markov", "num_target_layers",
            "vocab_size", "markov_rank", "markov_head_type",
        )),
        ("target_layer_ids", [0, 3], "`target_layer_ids` names the target's last layer"),
        ("target_layer_ids", [0, 9], "`target_layer_ids` must lie between -1"),
        ("draft_vocab_size", 20, "`draft_vocab_size` is 20 .*, but the weights lack `d2t`"),
        ("confidence_temperatures", [1.0] * 3),
        ("confidence_temperatures", [1.0, 1.0, 0.0, 1.0]),
        ("backbone_type", "llama"),
        ("backbone_type", "gemma4", r"the weights lack `layers.0.layer_scalar`"),
        ("attention_k_eq_v", True, "`attention_k_eq_v` is for"),
        ("final_logit_softcapping", -30.0),
        ("sample_from_anchor", "yes"),
        ("sliding_window", 0),
        ("rope_parameters", {"rope_type": "spiral", "rope_theta": 1e4}, "`rope_type` must be one of default, "),
        ("rope_parameters", {"full_attention": {"rope_type": "default", "rope_theta": 1e4}}),
        ("rope_parameters", {"rope_type": "default"}, "`rope_parameters` must be an object with a `rope_theta`"),
        ("rope_parameters", {"rope_type": "yarn", "rope_theta": 1e4}),
        ("rope_parameters", {"rope_type": "default", "rope_theta": None}),
        ("rope_parameters", {"rope_type": "linear", "factor": 0, "rope_theta": 1e4}, "must give 8 finite values"),
        (
            "rope_parameters",
            {"rope_type": "linear", "factor": 2, "rope_theta": 1e4, "partial_rotary_factor": 0.5},
            "`rope_parameters` .* must give 8 finite values, as `head_dim` says, got 4",
        ),
        ("attn_implementation", "someone/kernel", "`attn_implementation`, which a checkpoint may not choose"),
        ("_attn_implementation", "someone/kernel", "`_attn_implementation`, which a checkpoint may not choose"),
        ("quantization_config", {"quant_method": "gptq"}, "`quantization_config`, which a checkpoint may not choose"),
    ],
    "deepspec": [
        *((name, GONE) for name in ("num_target_layers", "vocab_size")),
        ("target_layer_ids", [1, 3], "`target_layer_ids` names the target's last layer"),  # counted as speculators does
        ("architectures", ["Qwen3DFlashModel"], "names a Qwen3DFlashModel, which has no heads, but sets `markov_rank`"),
        ("rope_parameters", None),
        ("rope_parameters", {"rope_type": "spiral", "rope_theta": 1e4}, "`rope_type` must be one of default, "),
        ("layer_types", ["sliding_attention", "full_attention"]),
        ("layer_types", 5),
        (("", "layer_types", "sliding_window"), (["sliding_attention"], None), "`layer_types` must be all"),
        ("sample_from_anchor", "yes"),
        ("rope_is_neox_style", False),
    ],
    "gemma4": [
        *((name, GONE) for name in ("num_target_layers", "vocab_size", "attention_k_eq_v", "rope_parameters")),
        ("target_layer_ids", [1, 3], "`target_layer_ids` names the target's last layer"),
        ("attention_k_eq_v", False, r"the weights lack `layers.0.self_attn.v_proj.weight`|k_proj.weight` must have shape"),
        ("attention_k_eq_v", "yes"),
        ("hidden_act", "silu"),
        ("final_logit_softcapping", 0.0),
        ("rope_parameters", {"rope_type": "default", "rope_theta": 1e4}),
        ("rope_parameters", {"full_attention": {"rope_type": "spiral", "rope_theta": 1e4}}, "`rope_type` must be one of"),
        ("rope_parameters", {"full_attention": {"rope_type": "proportional"}}, "an object with a `rope_theta`"),
        ("layer_types", ["full_attention", "sliding_attention"]),
        ("enable_moe_block", True),
        ("hidden_size_per_layer_input", 256),
        ("architectures", ["Qwen3DSparkModel"], "`head_dim`|`hidden_act`|`rope_parameters`"),
    ],
    "speculators": [
        *((name, GONE) for name in ("draft_vocab_size", "vocab_size", LAYERS)),
        ("speculators_model_type", "eagle3"),
        ("speculators_model_type", GONE),
        (LAYERS, 3),
        ((LAYERS, "model_type"), "llama"),
        ((LAYERS, "rope_theta"), None, "`rope_parameters` must be an object"),
        ((LAYERS, "rope_is_neox_style"), False),
        ((LAYERS, "layer_types"), ["sliding_attention"] * 2, "`layer_types` must be all full_attention, or"),
        # counted as DeepSpec does
        (("", "aux_hidden_state_layer_ids"), [-1, 2], "`aux_hidden_state_layer_ids` must be a list of whole"),
        ("sample_from_anchor", False, "`speculative_tokens` is 4 .* `sample_from_anchor` False"),
        ("sample_from_anchor", "yes"),
        ("block_size", 5, "`speculative_tokens` is 4 .* of 5, but by `sample_from_anchor` True"),
        ("speculators_config", {"algorithm": "eagle3"}, "`algorithm` must be 'dspark'"),
        ("speculators_config", {"proposal_methods": 3}, "`proposal_methods` must be a list"),
        ("speculators_config", {"proposal_methods": [{"speculative_tokens": 9}]}, "`speculative_tokens` is 9 .* `sample_from"),
        (
            "speculators_config",
            {"proposal_methods": [{"speculative_tokens": 4}, {"speculative_tokens": 3}]},
            r"`speculative_tokens` must be one positive number, got \[4, 3\]",
        ),
        ("speculators_config", [1]),
        (("", "sample_from_anchor", "block_size"), (GONE, 9), "`speculative_tokens` is 4 .* neither an anchor"),
        ("draft_vocab_size", 20, "`draft_vocab_size` is 20 .*, but the weights lack `d2t`"),
        ("target_hidden_size", 64, "`fc.weight` must have shape"),
    ],
    "reduced": [
        ("draft_vocab_size", 61, "`draft_vocab_size` is None .* the weights also hold `d2t`"),
        ("draft_vocab_size", 62),
        ("draft_vocab_size", 0),
        ("draft_vocab_size", 21, "must have shape .*21"),
        ("draft_vocab_size", GONE),
        ("target_hidden_size", 64, "`fc.weight` must have shape"),
    ],
    "specforge": [
        *((name, GONE) for name in ("vocab_size", "markov_head_type", "confidence_head_with_markov")),
        ("dflash_config", GONE, "of no known drafter"),
        ("dflash_config", []),
        (("", "mask_token_id"), 59, "contradicts itself: `mask_token_id` is 59, and 60"),
        ("projector_type", "mlp"),
        ("model_type", "lfm2"),
        ("sample_from_anchor", False),
        ("attention_mode", "mla"),
        ("confidence_temperatures", [1.0] * 4, "`confidence_temperatures` is .* Ornith"),
        ("target_layer_ids", [1, 3], "`target_layer_ids` names the target's last layer"),
        ("layer_types", ["full_attention", "sliding_attention"]),
        ("rope_theta", None, "`rope_parameters`"),
        ("rope_scaling", {"type": "yarn"}, "`rope_parameters`|rope_type"),
        ("rope_scaling", "yarn", "`rope_parameters`"),
    ],
    "modelopt": [
        ("shift_label", "yes"),
        ("shift_label", None),
        ("shift_label", GONE, r"`markov_w1.weight`|`enable_confidence_head`|`markov_head"),  # then it looks like SpecForge
        ("use_swa", True),
        (("", "causal"), True, "contradicts itself: `causal` is True, and False"),
        (("", "enable_confidence_head"), False, "`use_confidence_head` whether"),
        ("model_type", "llama"),
        ("vocab_size", GONE),
        ("rope_theta", None, "`rope_parameters`"),
        ("target_layer_ids", [1, 3], "`target_layer_ids` names the target's last layer"),
    ],
    "dflash": [
        ("dflash_config", GONE),
        ("dflash_config", 5),
        (("", "mask_token_id"), 59, "contradicts itself: `mask_token_id` is 59, and 60"),
        ("markov_rank", 6, "no heads, but `markov_rank` is 6"),
        ("enable_confidence_head", True, "no heads, but `enable_confidence_head` is True"),
        ("sample_from_anchor", True, "no heads, but `sample_from_anchor` is True"),
        ("shift_label", True, "`use_confidence_head`|`markov_rank`"),  # then it looks like Model-Optimizer
        ("vocab_size", GONE),
        (("", "use_sliding_window", "layer_types"), (True, GONE), "`use_sliding_window` is True, but `layer_types`"),
        ("model_type", "gpt_oss"),
        ("rope_theta", None, "`rope_parameters`"),
        ("rope_theta", "fast", "`rope_parameters`|rope_theta"),
        ("target_layer_ids", [1, 3], "`target_layer_ids` names the target's last layer"),
    ],
    "muse_glimmer": [
        ("layer_types", GONE),
        ("layer_types", ["sliding_attention", "full_attention"]),
        ("sliding_window", None, "`layer_types` must be all"),
        ("sliding_window", 0),
        ("sliding_window", "5"),
        ("rope_parameters", GONE),
        ("rope_parameters", {"rope_type": "spiral", "rope_theta": 1e4}, "`rope_type` must be one of default, "),
        ("rope_parameters", {"rope_type": "llama3", "rope_theta": 1e4}),
        ("model_type", "muse", "of no known drafter"),
        ("causal", True),
    ],
}  # fmt: skip
OWN_TENSORS = {
    "own": [
        ("embed_tokens.weight", torch.ones(61, 32)),
        ("d2t", torch.zeros(20, dtype=torch.long)),
    ],
    "deepspec": [
        ("embed_tokens.weight", lambda t: t[1:]),
        ("lm_head.weight", lambda t: t.T, "`lm_head.weight` must have shape .* it is transposed"),
        ("lm_head.weight", lambda t: t.to(torch.int8)),
    ],
    "gemma4": [
        ("layers.0.layer_scalar", None),
        ("layers.1.layer_scalar", nan),
        ("layers.1.layer_scalar", torch.ones(2)),
        ("layers.0.pre_feedforward_layernorm.weight", None),
        ("layers.1.post_feedforward_layernorm.weight", lambda t: t[:3]),
        ("layers.0.self_attn.v_proj.weight", torch.ones(16, 32)),
        ("layers.0.self_attn.v_norm.weight", torch.ones(16)),
        ("embed_tokens.weight", lambda t: t[1:]),
    ],
    "speculators": [
        ("d2t", torch.zeros(61, dtype=torch.long)),
        ("t2d", torch.ones(61, dtype=torch.bool)),
    ],
    "reduced": [
        ("d2t", None),
        ("t2d", None),
        ("d2t", lambda t: t.flip(0)),
        ("d2t", lambda t: t + 9),
        ("d2t", lambda t: t - 1),
        ("d2t", lambda t: t + 1, "`t2d` must mark exactly the 20 target tokens of `d2t`; it marks 20, not the same"),
        ("d2t", lambda t: t.float()),
        ("t2d", lambda t: t & False),
        ("t2d", lambda t: t[1:]),
        ("t2d", lambda t: t.to(torch.uint8)),
        ("lm_head.weight", lambda t: t[1:]),
        ("markov_head.markov_w2.weight", lambda t: torch.cat([t] * 4)[:61]),  # of the whole vocabulary
        ("markov_head.markov_w1.weight", lambda t: t[:20]),  # of the reduced one
    ],
    "specforge": [("embed_tokens.weight", torch.ones(61, 32))],
    "modelopt": [("markov_head.markov_w1.weight", torch.ones(61, 6), "hold both `markov_w1.weight` and")],
    "dflash": [("markov_head.markov_w1.weight", torch.ones(61, 6))],
    "muse_glimmer": [("fc.weight", torch.ones(32, 64), "hold both `encoder.fc.weight` and `fc.weight`")],
}


def change_field(content: dict, packaging: str, field, value) -> bool:
    """Changes a field where it lies; `False` where a packaging has no such field. Ids are counted as the packaging does."""
    if isinstance(field, tuple):
        place = content[field[0]] if field[0] else content
        names, values = field[1:], value if isinstance(value, tuple) else (value,)
    else:
        name = CALLED.get(packaging, {}).get(field, field)
        nested = (inner for inner in content.values() if isinstance(inner, dict) and name in inner)
        place = content if name in content else next(nested, None)
        if place is None:
            return False
        if name == "aux_hidden_state_layer_ids" and isinstance(value, list):
            value = [number + 1 if isinstance(number, int) else number for number in value]
        names, values = (name,), (value,)
    for name, value in zip(names, values, strict=True):
        if value is GONE:
            place.pop(name, None)
        else:
            place[name] = value
    return True


def without_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def pickled(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    without_weights(folder)
    torch.save(tensors, folder / "pytorch_model.bin")


def twice_in_the_header(folder: Path) -> None:
    data = (folder / "model.safetensors").read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = data[8 : 8 + length].replace(b'"norm.weight"', b'"layers.0.input_layernorm.weight"')
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + data[8 + length :])


def twice_in_the_config(folder: Path) -> None:
    path = folder / "config.json"
    path.write_text(path.read_text().replace("{", '{"rms_norm_eps": 1e-5, "rms_norm_eps": 1e-6,', 1))


def untrained(folder: Path) -> None:
    names = [name for name in load_file(folder / "model.safetensors") if re.search(r"norm(_enc)?\.weight$", name)]
    edit_tensors(folder, **{name.replace(".", "__"): torch.ones_like for name in names})


def without_last_layer(folder: Path) -> None:
    names = [name for name in load_file(folder / "model.safetensors") if name.startswith("layers.1.")]
    edit_tensors(folder, **{name.replace(".", "__"): None for name in names})


def renumbered(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    renamed = {name.replace("layers.1.", "layers.2."): tensor for name, tensor in tensors.items()}
    save_file(renamed, folder / "model.safetensors")


def two_sets(folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {}}')


def write(name: str, content: bytes):
    return lambda folder: (folder / name).write_bytes(content)


FILES = [
    (without_weights, "no weights: neither model.safetensors"),
    (pickled, r"the weights are in a pickle \(pytorch_model.bin\)"),
    (twice_in_the_header, "model.safetensors is not a complete safetensors file .*invalid offset for tensor `layers.0"),
    (twice_in_the_config, "config.json cannot be read as JSON .*`rms_norm_eps` is there twice"),
    (untrained, "every RMSNorm weight is exactly one"),
    (without_last_layer, "`num_hidden_layers` is 2, but the weights hold 1"),
    (renumbered, "the weights lack `layers.1."),
    (two_sets, "model.safetensors and model.safetensors.index.json both hold weights"),
    (write("model.safetensors", b"version https://git-lfs.github.com/spec/v1\n"), "only a git-lfs pointer"),
    (write("model.safetensors", b""), "model.safetensors is not a complete safetensors file"),
    (write("config.json", b"{"), "config.json cannot be read as JSON"),
    (write("config.json", b"\xff\xfe"), "config.json cannot be read as JSON"),
    (write("config.json", b"[" * 100_000), "config.json cannot be read as JSON"),
    (write("config.json", b'{"rms_norm_eps": NaN}'), "config.json cannot be read as JSON .*NaN is no number"),
    (write("config.json", b"[1, 2]"), "config.json must hold a JSON object, got a list"),
]


@pytest.fixture(scope="module")
def sources(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("sources")
    for packaging in PACKAGINGS:
        build(packaging, path / packaging)
    return path


def corruptions(packaging: str, content: dict, tensors: dict):
    """What happens to a folder, what the message must say, and how to call it."""
    heads = packaging not in ("dflash", "muse_glimmer")

    def config_edit(field, value):
        def edit(folder: Path) -> None:
            changed = copy.deepcopy(content)
            if not change_field(changed, packaging, field, value):
                changed[field] = value
            (folder / "config.json").write_text(json.dumps(changed))

        return edit

    def tensor_edit(name, change):
        return lambda folder: edit_tensors(folder, **{name.replace(".", "__"): change})

    called = CALLED.get(packaging, {})
    shared = [row for row in (*FIELDS, *(HEADS if heads else ())) if change_field(copy.deepcopy(content), packaging, *row[:2])]
    for field, value, *match in (*shared, *OWN_FIELDS[packaging]):
        name = field[-1] if isinstance(field, tuple) else field
        named = rf"[`']({name}|{called.get(name, name)})[`']"
        yield config_edit(field, value), match[0] if match else named, f"{field} = {value}"
    for name, change, *match in (*TENSORS, *(HEAD_TENSORS if heads else ())):
        theirs = called.get(name, name)
        yield tensor_edit(theirs, change), match[0] if match else f"`{re.escape(name)}`", f"tensor {name}"
    for name, change, *match in OWN_TENSORS[packaging]:
        yield tensor_edit(name, change), match[0] if match else f"`{re.escape(name)}`", f"tensor {name}"
    for edit, match in FILES:
        yield edit, match, getattr(edit, "__name__", "file")


@pytest.mark.parametrize("packaging", PACKAGINGS)
def test_every_single_corruption_is_refused_by_name(sources, tmp_path, packaging):
    source = sources / packaging
    DSparkDraftModel.from_pretrained(source)
    content, tensors = json.loads((source / "config.json").read_text()), load_file(source / "model.safetensors")
    wrong, count = [], 0
    for edit, match, label in corruptions(packaging, content, tensors):
        damaged = shutil.copytree(source, tmp_path / f"{count}")
        edit(damaged)
        count += 1
        try:
            DSparkDraftModel.from_pretrained(damaged)
        except CheckpointError as error:
            message = str(error).removeprefix(f"{damaged}: ")
            if not re.search(match, message):
                wrong.append(f"{label}: expected {match!r}, got {message!r}")
        except Exception as error:
            wrong.append(f"{label}: {type(error).__name__}: {error}")
        else:
            wrong.append(f"{label}: not refused")
        shutil.rmtree(damaged)
    assert not wrong, f"{len(wrong)} of {count}:\n" + "\n".join(wrong)
    assert count >= 80
