"""Parameters that do not fit their group."""

from __future__ import annotations

import libmuon
import pytest
import torch


def matrix(*shape):
    return torch.nn.Parameter(torch.randn(shape or (4, 3)))


def test_b5_b14_all_parameters_that_are_no_matrices_are_listed_at_once():
    groups = [
        {"params": [("conv.weight", matrix(8, 4, 3, 3)), ("bias", matrix(8))]},
        {"params": [("experts", matrix(3, 4, 5)), ("fine", matrix(3, 4)), ("gain", matrix(1))]},
    ]
    groups[1]["params"].append(("scalar", torch.nn.Parameter(torch.tensor(1.0))))
    with pytest.raises(ValueError) as error:
        libmuon.Muon(groups)
    text = str(error.value)
    assert text.startswith(
        "Muon only supports 2D parameters whereas we found a parameter with size: "
        "torch.Size([8, 4, 3, 3])"
    )
    for line in ("conv.weight: (8, 4, 3, 3)", "bias: (8,)", "experts: (3, 4, 5)", "gain: (1,)"):
        assert line in text
    assert "scalar: ()" in text
    assert "fine" not in text
    for option in ("rows=", "cols=", "flatten=True", "batch_dims=", "algorithm='adamw'"):
        assert option in text


@pytest.mark.parametrize("shape", [(64, 1, 1), (1, 1, 64), (64,)])
def test_b9_gain_like_shapes_are_refused_at_construction(shape):
    with pytest.raises(ValueError, match="Muon only supports 2D parameters"):
        libmuon.Muon([matrix(*shape)])


@pytest.mark.parametrize(
    ("shape", "options", "text"),
    [
        ((9, 4), {"split_sizes": (4, 4)}, "split_sizes must sum to dim 0"),
        ((9, 4), {"num_heads": 2}, "num_heads to divide"),
        ((8, 4), {"num_heads": 2, "split_sizes": (4, 4)}, "split_sizes or num_heads"),
        ((8, 4, 3), {"rows": 0, "flatten": True}, "one of rows/cols, flatten and batch_dims"),
        ((8, 4, 3), {"rows": 5}, "rows to hold dims"),
        ((8, 4, 3), {"rows": 0, "cols": 0}, "at most once"),
        ((8, 4, 3), {"batch_dims": 2}, "batch_dims to leave at least two dims"),
        ((8, 4, 2), {"complex_dim": 1}, "complex_dim should be the last dim"),
        ((8, 4, 3), {"complex_dim": -1}, "last dim has size 2"),
    ],
)
def test_b16_layouts_that_do_not_fit_name_the_parameter(shape, options, text):
    with pytest.raises(ValueError, match=text) as error:
        libmuon.Muon([("qkv.weight", matrix(*shape))], **options)
    assert "qkv.weight" in str(error.value)


def test_complex_dim_takes_the_index_of_the_last_dim():
    for dim in (-1, 2):
        assert (
            libmuon.Muon([matrix(4, 3, 2)], complex_dim=dim).param_groups[0]["complex_dim"] == dim
        )


def test_fused_names_the_tensor_it_is_not_for():
    param = torch.nn.Parameter(torch.randn(4, 3, dtype=torch.complex64))
    with pytest.raises(RuntimeError, match=r"`fused=True` requires all the params.*spectrum"):
        libmuon.Muon([("spectrum", param)], fused=True)


def test_added_group_is_named_by_its_place():
    optimizer = libmuon.Muon([matrix()])
    with pytest.raises(ValueError, match="parameter 0 of group 1"):
        optimizer.add_param_group({"params": [matrix(3)]})


def test_bfloat16_parameters_get_one_warning():
    param = torch.nn.Parameter(torch.randn(4, 3, dtype=torch.bfloat16))
    with pytest.warns(UserWarning, match="updates below 1/256") as warned:
        libmuon.Muon([{"params": [param]}, {"params": [param.detach().clone()]}])
    assert len(warned) == 1
    assert warned[0].filename == __file__
