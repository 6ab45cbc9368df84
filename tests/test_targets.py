"""Targets that are more than a text model in one piece: with images, quantised, offloaded, distributed.

With each of them greedy text equals plain `generate` of the same target, and the drafter reads what that target computes.
"""

import pytest
import torch
from tiny import (
    PAD,
    SHAPE,
    VOCABULARY,
    WINDOW,
    assert_same_text,
    assert_some_accepted,
    draw_weights,
    jagged_profile,
    one_thread,  # noqa: F401
    padded_prompts,
    tiny_drafter,
    tiny_target,
)
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from transformers import (
    AutoModelForCausalLM,
    BitsAndBytesConfig,
    Gemma4Config,
    Gemma4ForConditionalGeneration,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
)

PROMPTS = {"one row": [5], "three rows": [2, 7, 4]}
REDUCED = [token for token in range(VOCABULARY) if token % 7]
IMAGE, VIDEO, IMAGE_START, IMAGE_END = 44, 47, 45, 46


def generate(target, inputs, drafter=None, **options):
    options = {"max_new_tokens": 20, "eos_token_id": None, "pad_token_id": PAD} | options
    return target.generate(**inputs, do_sample=False, assistant_model=drafter, **options)


def assert_same(target, inputs, drafter):
    drafter.load_profile = jagged_profile()
    assert torch.equal(generate(target, inputs, drafter), generate(target, inputs))
    assert_some_accepted(drafter)


# ---- images ----


def multimodal_target(kind):
    """A Qwen3-VL or Gemma4 with random weights, whose text part is as easy as that of a tiny target."""
    text = SHAPE | {"vocab_size": VOCABULARY}
    vision = {"hidden_size": 32, "intermediate_size": 48, "patch_size": 4}
    tokens = {"image_token_id": IMAGE, "video_token_id": VIDEO, "tie_word_embeddings": False}
    torch.manual_seed(0)
    if kind == "qwen3_vl":
        rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1], "mrope_interleaved": True}
        vision |= {"depth": 2, "num_heads": 4, "out_hidden_size": 32, "num_position_embeddings": 64}
        vision |= {"deepstack_visual_indexes": [0, 1]}
        tokens |= {"vision_start_token_id": IMAGE_START, "vision_end_token_id": IMAGE_END}
        model = Qwen3VLForConditionalGeneration(
            Qwen3VLConfig(text_config=text | {"rope_parameters": rope}, vision_config=vision, **tokens)
        )
    else:
        text |= {
            "sliding_window": WINDOW,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "final_logit_softcapping": 8.0,
            "hidden_size_per_layer_input": 4,
            "vocab_size_per_layer_input": VOCABULARY,
            "global_head_dim": 16,
            "use_bidirectional_attention": "vision",
        }
        vision |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 8}
        vision |= {"position_embedding_size": 64, "pooling_kernel_size": 2}
        tokens |= {"boi_token_id": IMAGE_START, "eoi_token_id": IMAGE_END}
        model = Gemma4ForConditionalGeneration(Gemma4Config(text_config=text, vision_config=vision, **tokens))
    draw_weights(model)
    return model.eval()


def prompts_with_images(kind, lengths):
    """Prompts with an image of four tokens (16 patches) and as many words behind it as asked for, left-padded."""
    rows = [[5 + n, 6, IMAGE_START, *[IMAGE] * 4, IMAGE_END, *range(7, 7 + n)] for n in lengths]
    longest, generator = max(map(len, rows)), torch.Generator().manual_seed(1)
    ids = torch.tensor([[PAD] * (longest - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows])
    inputs = {"input_ids": ids, "attention_mask": mask, "mm_token_type_ids": (ids == IMAGE).long()}
    if kind == "qwen3_vl":
        inputs["pixel_values"] = torch.randn(16 * len(rows), 3 * 2 * 4 * 4, generator=generator)
        inputs["image_grid_thw"] = torch.tensor([[1, 4, 4]] * len(rows))
    else:
        inputs["pixel_values"] = torch.rand(len(rows), 16, 3 * 4 * 4, generator=generator)
        places = torch.stack(torch.meshgrid(torch.arange(4), torch.arange(4), indexing="xy"), dim=-1)
        inputs["image_position_ids"] = places.view(1, 16, 2).repeat(len(rows), 1, 1)
    return inputs


@pytest.mark.parametrize("lengths", [[3], [3, 1, 5]], ids=PROMPTS)
@pytest.mark.parametrize("kind", ["qwen3_vl", "gemma4"])
def test_multimodal(kind, lengths):
    """Behind images, the drafter gets text positions and the states of the same layers; text alone works as well."""
    target = multimodal_target(kind)
    drafter = tiny_drafter(target)
    assert_same(target, padded_prompts(lengths), drafter)
    inputs = prompts_with_images(kind, lengths)
    assert torch.equal(generate(target, inputs, drafter), generate(target, inputs))
    assert drafter.statistics.accepted
    with torch.no_grad():
        logits = [
            target(**inputs | {"pixel_values": pixels}).logits
            for pixels in (inputs["pixel_values"], 0 * inputs["pixel_values"])
        ]
    assert (logits[0] - logits[1])[:, -1].abs().max() > 0.01, "the image has no effect"


class Disguised(torch.Tensor):
    """Weights of a class of their own, as quantised ones are."""


@pytest.mark.parametrize("disguised", [False, True], ids=["plain", "of a class of its own"])
def test_head_with_a_bias(disguised):
    """As Phi's; a reduced vocabulary takes the rows of both."""
    target = tiny_target()
    head = target.lm_head
    target.lm_head = torch.nn.Linear(head.in_features, head.out_features)
    torch.nn.init.normal_(target.lm_head.bias, std=3)
    weight = head.weight.detach().as_subclass(Disguised) if disguised else head.weight
    target.lm_head.weight = torch.nn.Parameter(weight, requires_grad=False)
    drafter = tiny_drafter(target, draft_token_ids=REDUCED)
    drafter.bind(target)
    hidden = torch.randn(3, 32)
    wanted = drafter.bound_target.full_logits(hidden)[:, drafter.draft_token_ids]
    torch.testing.assert_close(drafter.base_logits(hidden), wanted.as_subclass(torch.Tensor))
    assert_same(target, padded_prompts([3, 1, 5]), drafter)


# ---- weights that are not simply there ----


@pytest.mark.parametrize("reduced", [None, REDUCED], ids=["whole vocabulary", "reduced"])
def test_offloaded_target(tmp_path, reduced):
    """Layers, head and embedding on disk, where they are read for every forward: the hooks of accelerate stay in charge."""
    target = tiny_target("qwen3")
    target.save_pretrained(tmp_path / "target")
    places = {"model.layers.0": "cpu", "model.layers.1": "disk", "model.layers.2": "cpu", "model.layers.3": "disk"}
    places |= {"model.embed_tokens": "disk", "model.norm": "cpu", "model.rotary_emb": "cpu", "lm_head": "disk"}
    offloaded = AutoModelForCausalLM.from_pretrained(
        tmp_path / "target", device_map=places, offload_folder=tmp_path / "disk", dtype=torch.float32
    )
    assert offloaded.lm_head.weight.is_meta and offloaded.get_input_embeddings().weight.is_meta
    drafter = tiny_drafter(target, draft_token_ids=reduced)
    for lengths in PROMPTS.values():
        assert_same(offloaded, padded_prompts(lengths), drafter)
    hidden = torch.randn(3, 32)
    drafts = drafter.base_logits(hidden)
    drafter.bind(target)
    torch.testing.assert_close(drafts, drafter.base_logits(hidden))


class Int8Linear(nn.Module):
    """A linear layer whose weight is stored in eight bits a value, with a scale for each row, as quantisers do it."""

    def __init__(self, linear):
        super().__init__()
        self.scale = linear.weight.detach().abs().amax(1, keepdim=True) / 127
        self.weight = nn.Parameter((linear.weight.detach() / self.scale).round().to(torch.int8), requires_grad=False)

    def forward(self, inputs):
        return nn.functional.linear(inputs, self.weight.to(inputs.dtype) * self.scale)


def quantised(target, folder, quantiser):
    """The same target with every linear layer quantised, the head included."""
    if quantiser == "own":
        for module in list(target.modules()):
            for name, child in list(module.named_children()):
                if isinstance(child, nn.Linear):
                    setattr(module, name, Int8Linear(child))
        return target
    pytest.importorskip("bitsandbytes")
    target.save_pretrained(folder)
    how = {"load_in_8bit": True} if quantiser == "8 bits" else {"load_in_4bit": True, "bnb_4bit_compute_dtype": torch.float32}
    config = BitsAndBytesConfig(llm_int8_skip_modules=[], **how)
    return AutoModelForCausalLM.from_pretrained(folder, quantization_config=config, dtype=torch.float32, device_map={"": "cpu"})


@pytest.mark.filterwarnings("ignore:MatMul8bitLt")  # 2026-11-30: bitsandbytes casts to float16, and says so
@pytest.mark.parametrize("reduced", [None, REDUCED], ids=["whole vocabulary", "reduced"])
@pytest.mark.parametrize("quantiser", ["own", "8 bits", "4 bits"])
def test_quantised_target(tmp_path, quantiser, reduced):
    """A quantised head answers through its own module; only a reduced vocabulary gets rows of its own."""
    drafter = tiny_drafter(tiny_target("qwen3"), draft_token_ids=reduced)
    target = quantised(tiny_target("qwen3"), tmp_path, quantiser)
    assert not target.lm_head.weight.is_floating_point()
    for lengths in PROMPTS.values():
        assert_same(target, padded_prompts(lengths), drafter)
    hidden = torch.randn(3, 32)
    expected = target.lm_head(hidden)[:, reduced or slice(None)]
    # LLM.int8 rounds its inputs as well, which rows of one's own do not.
    torch.testing.assert_close(drafter.base_logits(hidden), expected, rtol=1e-4, atol=0.1 if quantiser == "8 bits" else 1e-4)


@pytest.fixture
def one_process_group():
    """A group of this process alone: weights become the same distributed tensors as among several."""
    distributed = torch.distributed
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


@pytest.mark.parametrize("reduced", [None, REDUCED], ids=["whole vocabulary", "reduced"])
def test_distributed_weights(one_process_group, reduced):
    """Embedding and head stay distributed as they are, and are asked through their own modules."""
    target, split = tiny_target("qwen3"), tiny_target("qwen3")
    styles = {
        "model.embed_tokens": RowwiseParallel(input_layouts=Replicate()),
        "model.layers.*.mlp.up_proj": ColwiseParallel(),
        "model.layers.*.mlp.gate_proj": ColwiseParallel(),
        "model.layers.*.mlp.down_proj": RowwiseParallel(),
        "lm_head": ColwiseParallel(output_layouts=Replicate()),
    }
    parallelize_module(split, init_device_mesh("cpu", (1,)), styles)
    weights = dict(split.named_parameters())
    assert isinstance(split.lm_head.weight, DTensor) and isinstance(split.get_input_embeddings().weight, DTensor)
    drafter = tiny_drafter(target, draft_token_ids=reduced)
    for lengths in PROMPTS.values():
        assert_same(split, padded_prompts(lengths), drafter)
    assert all(weight is weights[name] for name, weight in split.named_parameters())
    hidden = torch.randn(3, 32)
    drafts = drafter.base_logits(hidden)
    drafter.bind(target)
    torch.testing.assert_close(drafts, drafter.base_logits(hidden))


# ---- wrapped ----


@pytest.mark.parametrize("lengths", [[5], [9, 4, 6], [4, 4]])
def test_a_wrapper_that_hides_the_signature(lengths):
    """`generate` then prepares no positions, and the model would count from the cache, which rows fill at their own pace."""
    target = tiny_target()
    drafter, inputs, forward = tiny_drafter(target), padded_prompts(lengths), target.forward
    target.forward = lambda *args, **kwargs: forward(*args, **kwargs)
    plain = generate(target, inputs, max_new_tokens=16)
    assert_same_text(target, inputs, plain, generate(target, inputs, drafter, max_new_tokens=16))
    assert_some_accepted(drafter)
    if len(set(lengths)) == 1:  # no mask, which the host then does not make up either
        ids = {"input_ids": inputs["input_ids"]}
        assert torch.equal(generate(target, ids, drafter, max_new_tokens=16), generate(target, ids, max_new_tokens=16))


# ---- compiled ----


def test_compiled_target():
    """Its forward runs as captured graphs, whose shapes change with every draft."""
    target = tiny_target("llama", num_hidden_layers=2)
    drafter = tiny_drafter(target, target_layer_ids=[-1, 0])
    inputs, graphs = padded_prompts([3, 5]), []
    plain = generate(target, inputs, max_new_tokens=6)

    def keep(graph, example_inputs):
        graphs.append(graph)
        return graph.forward

    target.compile(backend=keep)
    assert torch.equal(generate(target, inputs, drafter, max_new_tokens=6), plain)
    assert_some_accepted(drafter)
    assert graphs
    torch.compiler.reset()
