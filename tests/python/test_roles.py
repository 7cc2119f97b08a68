"""What a parameter is, by its module, its name and its shape."""

from __future__ import annotations

import json
import pathlib

import libmuon
import pytest
import torch
from libmuon.groups import route_parameters
from routing_models import (
    Conv1D,
    Experts,
    Twin,
    algorithms,
    decisions,
    module_of,
    parameter,
    step_once,
    text_of,
)
from torch import nn

GOLDEN = pathlib.Path(__file__).parents[1] / "golden"


def test_every_sort_of_parameter_is_routed_as_in_cpp():
    expected = dict(json.loads((GOLDEN / "routing.json").read_text()))
    got = {name: text_of(decision) for name, decision in decisions(Twin()).items()}
    assert got.pop("tied") == expected.pop("tied")
    del expected["wte.weight"]  # the same tensor
    assert got == expected


def test_wrappers_leave_no_trace_in_names():
    plain = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    expected = list(decisions(plain))
    assert list(decisions(torch.compile(plain))) == expected
    assert list(decisions(torch.compile(nn.DataParallel(plain)))) == expected
    assert list(decisions(nn.DataParallel(torch.compile(plain)))) == expected
    assert list(decisions(module_of(module=plain, own=nn.Linear(8, 8)))) == [
        *(f"module.{name}" for name in expected),
        "own.weight",
        "own.bias",
    ]


def test_parametrized_weights_are_seen_as_their_module_sees_them():
    model = module_of(
        conv=nn.utils.parametrizations.weight_norm(nn.Conv1d(8, 8, 3, bias=False)),
        head=nn.utils.parametrizations.orthogonal(nn.Linear(8, 8, bias=False)),
    )
    got = decisions(model)
    assert text_of(got["conv.parametrizations.weight.original0"]) == "adamw weight_decay=0"
    assert text_of(got["conv.parametrizations.weight.original1"]) == "muon flatten=1"
    assert text_of(got["head.parametrizations.weight.original"]) == "adamw"


def test_parameters_without_a_shape_are_refused():
    with pytest.raises(ValueError, match=r"'0\.weight' of LazyLinear has no shape yet"):
        libmuon.group_parameters(nn.Sequential(nn.LazyLinear(4)))


# --- shapes ---------------------------------------------------------------------------------------


def test_b2_summary_of_a_small_cnn():
    cnn = nn.Sequential(
        nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 32, 3), nn.Flatten()
    )
    model = module_of(features=cnn, fc=nn.Linear(32, 10))
    count = dict.fromkeys(("muon", "adamw"), 0)
    for d in route_parameters(model):
        count[d.options["algorithm"]] += d.parameter.numel()
    assert count == {"muon": 16 * 27 + 32 * 144, "adamw": 16 + 32 + 2 * 16 + 10 * 32 + 10}


@pytest.mark.parametrize("shape", [(64, 1, 1), (1, 64), (1, 1, 64)])
def test_b9_gain_like_shapes_go_to_adamw(shape):
    model = module_of(hidden=nn.Linear(8, 8, bias=False), layer=module_of(g=parameter(*shape)))
    assert algorithms(model) == {"hidden.weight": "muon", "layer.g": "adamw"}
    step_once(model, libmuon.group_parameters(model))


@pytest.mark.parametrize(
    ("shape", "algorithm"),
    [
        ((4, 2048), "adamw"),
        ((2048, 4), "adamw"),
        ((4, 512), "muon"),  # aspect 128 is the last that Muon takes
        ((3, 64), "adamw"),
        ((1, 196, 768), "adamw"),
        ((0, 64), "adamw"),
    ],
)
def test_b10_thin_shapes_go_to_adamw(shape, algorithm):
    model = module_of(hidden=nn.Linear(8, 8, bias=False), other=module_of(w=parameter(*shape)))
    assert algorithms(model)["other.w"] == algorithm


def test_b10_depthwise_kernels_go_to_adamw_and_rules_change_that():
    model = nn.Sequential(nn.Conv2d(96, 96, 3, groups=96, bias=False), nn.Conv2d(1, 32, 3))
    assert algorithms(model) == {"0.weight": "adamw", "1.weight": "muon", "1.bias": "adamw"}
    forced = decisions(model, [("0.weight", "muon")])["0.weight"]
    assert text_of(forced) == "muon flatten=1"
    assert forced.reason == "rule 0 (0.weight)"


def test_b10_thin_blocks_of_a_grouped_convolution_go_to_adamw():
    model = nn.Sequential(nn.Conv2d(8, 8, 3, groups=4, bias=False), nn.Linear(8, 8, bias=False))
    assert decisions(model)["0.weight"].reason == "too thin for Muon: 2 x 18"


def test_b11_lora_factors_have_their_own_rules():
    adapter = module_of(lora_A=nn.Linear(64, 8, bias=False), lora_B=nn.Linear(8, 64, bias=False))
    wide = nn.Linear(4096, 16, bias=False)
    model = module_of(q=adapter, k=module_of(lora_A=wide))
    assert algorithms(model) == {
        "q.lora_A.weight": "muon",
        "q.lora_B.weight": "muon",
        "k.lora_A.weight": "adamw",
    }
    only_b = algorithms(model, [("*.lora_A.*", "adamw")])
    assert [name for name, algorithm in only_b.items() if algorithm == "muon"] == [
        "q.lora_B.weight"
    ]


def test_b12_convolutions_flatten_beside_experts_that_batch():
    model = module_of(short_conv=nn.Conv1d(8, 8, 4, bias=False), moe=Experts())
    got = decisions(model, [("moe.*_proj", {"batch_dims": 1})])
    assert text_of(got["short_conv.weight"]) == "muon flatten=1"
    assert text_of(got["moe.gate_up_proj"]) == "muon batch_dims=1"
    step_once(model, libmuon.group_parameters(model, [("moe.*_proj", {"batch_dims": 1})]))


@pytest.mark.parametrize("shape", [(3, 6, 5), (2, 3, 6, 5)])
def test_b13_a_batched_stack_equals_its_matrices(shape):
    stack = nn.Parameter(torch.randn(shape, dtype=torch.float64))
    stack.grad = torch.randn_like(stack)
    apart = [nn.Parameter(m.clone()) for m in stack.detach().flatten(0, -3)]
    for p, grad in zip(apart, stack.grad.flatten(0, -3), strict=True):
        p.grad = grad.clone()
    rule = ("stack", {"batch_dims": len(shape) - 2})
    libmuon.Muon(libmuon.group_parameters(module_of(stack=stack), [rule]), lr=0.1).step()
    libmuon.Muon(libmuon.group_parameters(nn.ParameterList(apart)), lr=0.1).step()
    torch.testing.assert_close(
        stack.detach().flatten(0, -3), torch.stack(apart).detach(), rtol=1e-12, atol=1e-12
    )


def test_b20_weights_stored_transposed_get_the_transposed_update():
    linear = nn.Linear(16, 8).double()
    stored = Conv1D(8, 16).double()
    stored.weight.data = linear.weight.detach().T.clone()
    stored.bias.data = linear.bias.detach().clone()
    x = torch.randn(4, 16, dtype=torch.float64)
    groups = {}
    for model in (linear, stored):
        model(x).square().sum().backward()
        # This scale, sqrt(rows / cols), tells a matrix from its transpose.
        rules = [("weight", {"adjust_lr_fn": "spectral_unclamped"}), ("*", {"lr": 0.1})]
        groups[model] = libmuon.group_parameters(model, rules)
        libmuon.Muon(groups[model]).step()
    assert groups[stored][0]["rows"] == (1,)
    torch.testing.assert_close(stored.weight.T, linear.weight, rtol=1e-12, atol=1e-12)

    unaware = module_of(w=nn.Parameter(torch.zeros(16, 8)))
    assert text_of(decisions(unaware)["w"]) == "muon"


def test_b20_transposed_convolutions_follow_their_output_channels():
    conv = nn.ConvTranspose2d(8, 6, 3, bias=False).double()
    twin = nn.Conv2d(8, 6, 3, bias=False).double()
    twin.weight.data = conv.weight.detach().transpose(0, 1).contiguous()
    conv.weight.grad = torch.randn_like(conv.weight)
    twin.weight.grad = conv.weight.grad.transpose(0, 1).contiguous()
    for model in (conv, twin):
        libmuon.Muon(libmuon.group_parameters(model), lr=0.1).step()
    torch.testing.assert_close(conv.weight.transpose(0, 1), twin.weight, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", [nn.Conv2d, nn.ConvTranspose2d])
def test_groups_of_a_convolution_are_separate_convolutions(kind):
    whole = kind(16, 8, 3, groups=2, bias=False).double()
    parts = nn.ModuleList(kind(8, 4, 3, bias=False).double() for _ in range(2))
    whole.weight.grad = torch.randn_like(whole.weight)
    # Both kinds stack their groups along dim 0.
    for part, value, grad in zip(
        parts, whole.weight.detach().chunk(2), whole.weight.grad.chunk(2), strict=True
    ):
        part.weight.data, part.weight.grad = value.clone(), grad.clone()
    for model in (whole, parts):
        libmuon.Muon(libmuon.group_parameters(model), lr=0.1).step()
    expected = torch.cat([part.weight.detach() for part in parts])
    torch.testing.assert_close(whole.weight.detach(), expected, rtol=1e-12, atol=1e-12)


# --- embeddings and heads -------------------------------------------------------------------------


class LanguageModel(nn.Module):
    """Names that say nothing, and the accessors by which transformers' models tell."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(32, 8, bias=False)
        self.middle = nn.Linear(8, 8, bias=False)
        self.last = nn.Linear(8, 32, bias=False)

    def get_input_embeddings(self) -> nn.Module:
        return self.first

    def get_output_embeddings(self) -> nn.Module:
        return self.last


def test_c1_embeddings_and_heads_stay_off_muon():
    got = decisions(module_of(inner=LanguageModel()))
    assert {name: d.options["algorithm"] for name, d in got.items()} == {
        "inner.first.weight": "adamw",
        "inner.middle.weight": "muon",
        "inner.last.weight": "adamw",
    }
    assert got["inner.first.weight"].reason == "embedding (get_input_embeddings)"
    assert got["inner.last.weight"].reason == "head (get_output_embeddings)"
    by_type = module_of(a=nn.Embedding(32, 8), b=nn.EmbeddingBag(32, 8), c=nn.Linear(8, 8))
    assert algorithms(by_type)["a.weight"] == algorithms(by_type)["b.weight"] == "adamw"
    adaptive = module_of(a=nn.AdaptiveLogSoftmaxWithLoss(16, 64, [8, 32]), c=nn.Linear(16, 16))
    assert {n for n, a in algorithms(adaptive).items() if a == "muon"} == {"c.weight"}


def test_c1_models_without_embeddings_say_so():
    class Vision(LanguageModel):
        def get_input_embeddings(self):
            raise NotImplementedError

        def get_output_embeddings(self):
            return None

    assert set(algorithms(Vision()).values()) == {"muon"}


def test_c1_a_convolution_of_patches_is_no_embedding():
    model = LanguageModel()
    model.first = nn.Conv2d(3, 16, 4, bias=False)
    assert algorithms(model)["first.weight"] == "muon"


def test_c2_copies_of_a_tied_embedding_are_routed_alike_on_every_stage():
    tied = nn.Embedding(32, 8)
    whole = module_of(wte=tied, hidden=nn.Linear(8, 8), out_map=nn.Linear(8, 32, bias=False))
    whole.out_map.weight = tied.weight
    assert decisions(whole)["wte.weight"].options == {"algorithm": "adamw"}

    first = module_of(wte=nn.Embedding(32, 8), hidden=nn.Linear(8, 8))
    last = module_of(hidden=nn.Linear(8, 8), lm_head=nn.Linear(8, 32, bias=False))
    assert decisions(first)["wte.weight"].options == decisions(last)["lm_head.weight"].options


def test_c2_a_shared_weight_takes_the_union_of_its_roles():
    model = module_of(
        mixer=nn.Linear(8, 32, bias=False), wte=nn.Embedding(32, 8), hidden=nn.Linear(8, 8)
    )
    model.mixer.weight = model.wte.weight
    decision = decisions(model)["mixer.weight"]
    assert decision.options["algorithm"] == "adamw"
    assert decision.reason == "shared with wte.weight: embedding (Embedding)"
    # Rules see a shared weight under each of its names.
    rules = [("wte.weight", {"lr_multiplier": 0.5})]
    assert decisions(model, rules)["mixer.weight"].options["lr_multiplier"] == 0.5


def test_c7_two_dimensions_are_not_enough_for_muon():
    model = module_of(
        tok_embeddings=nn.Linear(32, 8, bias=False),
        layers=nn.ModuleList([nn.Linear(8, 8, bias=False)]),
        output=nn.Linear(8, 32, bias=False),
    )
    assert algorithms(model) == {
        "tok_embeddings.weight": "adamw",
        "layers.0.weight": "muon",
        "output.weight": "adamw",
    }


@pytest.mark.parametrize("name", ["head", "lm_head", "cls_head", "classifier", "unembed", "score"])
def test_c12_the_head_is_found_by_its_full_name(name):
    model = module_of(body=nn.Linear(8, 8, bias=False), **{name: nn.Linear(8, 8, bias=False)})
    assert algorithms(model) == {"body.weight": "muon", f"{name}.weight": "adamw"}


@pytest.mark.parametrize(
    ("name", "algorithm"),
    [
        ("unmasked_proj.weight", "muon"),
        ("tok_emb.weight", "adamw"),
        ("head.weight", "adamw"),
        ("patch_embed.weight", "muon"),
    ],
)
def test_q3_whole_words_of_names_count(name, algorithm):
    pairs = [(name, parameter(16, 8)), ("blocks.0.up.weight", parameter(16, 8))]
    assert algorithms(pairs)[name] == algorithm


def test_n1_not_every_matrix_of_a_model_goes_to_muon():
    model = module_of(
        embedding=nn.Embedding(32, 8),
        conv=nn.Conv1d(8, 8, 3, bias=False),
        hidden=nn.Linear(8, 8, bias=False),
        head=nn.Linear(8, 32, bias=False),
    )
    assert algorithms(model) == {
        "embedding.weight": "adamw",
        "conv.weight": "muon",
        "hidden.weight": "muon",
        "head.weight": "adamw",
    }
