"""state_dict and load_state_dict: dtypes, hooks, all or nothing, other tools."""

from __future__ import annotations

import copy
import io

import libmuon
import pytest
import torch
import torch.distributed.checkpoint.state_dict as dcp
from torch import nn


def parameter(*shape, dtype=torch.float32):
    return nn.Parameter(torch.randn(shape, dtype=dtype))


def groups_for(params):
    matrix, gain = params
    return [
        {"params": [("matrix", matrix)], "lr": 0.1},
        {"params": [("gain", gain)], "algorithm": "adamw", "lr": 0.01, "amsgrad": True},
    ]


def trained(steps=2, **options):
    params = parameter(4, 3), parameter(3)
    optimizer = libmuon.Muon(groups_for(params), **options)
    for _ in range(steps):
        for param in params:
            param.grad = torch.randn_like(param)
        optimizer.step()
    return params, optimizer


def snapshot(optimizer):
    """Everything of a state dict, copied."""
    return copy.deepcopy(optimizer.state_dict())


def assert_same(actual, expected):
    assert actual["param_groups"] == expected["param_groups"]
    torch.testing.assert_close(actual["state"], expected["state"], rtol=0, atol=0)


def test_keys_are_torchs_and_adams():
    _, optimizer = trained()
    state = optimizer.state_dict()["state"]
    assert list(state[0]) == ["momentum_buffer"]
    assert set(state[1]) == {"exp_avg", "exp_avg_sq", "max_exp_avg_sq", "step"}
    assert state[1]["step"] == 2
    assert (state[1]["step"].dtype, state[1]["step"].shape) == (torch.float32, ())


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [(torch.float16, torch.float32), (torch.complex64, torch.float32), (torch.float64, None)],
)
def test_normuon_keeps_one_number_a_row_in_float32_or_better(dtype, expected):
    param = parameter(3, 4, 5, dtype=dtype)
    optimizer = libmuon.Muon([param], algorithm="normuon", batch_dims=1)
    saved = snapshot(optimizer)
    (entry,) = saved["state"].values()
    assert set(entry) == {"momentum_buffer", "variance_neuron"}
    assert entry["variance_neuron"].shape == (3, 4, 1)
    optimizer.load_state_dict(saved)
    assert optimizer.state[param]["variance_neuron"].dtype == (expected or dtype)


def test_empty_saved_state_is_a_fresh_start():
    (matrix, gain), optimizer = trained()
    fresh = libmuon.Muon(groups_for((matrix, gain)))
    saved = fresh.state_dict()
    saved["state"] = {}
    optimizer.load_state_dict(saved)
    assert not optimizer.state
    assert optimizer.state_dict()["state"][0]["momentum_buffer"].count_nonzero() == 0


def test_e5_parameters_that_never_had_a_gradient_save_and_load():
    params = parameter(4, 3), parameter(5, 3)
    optimizer = libmuon.Muon(params)
    params[0].grad = torch.randn(4, 3)
    optimizer.step()
    saved = snapshot(optimizer)
    assert list(saved["state"]) == [0, 1]
    other = libmuon.Muon(params)
    other.load_state_dict(saved)
    assert_same(other.state_dict(), saved)
    # And a file that has no state for them, as torch writes it.
    del saved["state"][1]
    other.load_state_dict(saved)
    assert list(other.state_dict()["state"]) == [0, 1]


@pytest.mark.filterwarnings("ignore:bfloat16 parameters")
def test_dtype_after_a_load_is_the_runs_own_and_no_bit_is_rounded_on_the_way():
    param = parameter(4, 3, dtype=torch.bfloat16)
    optimizer = libmuon.Muon([param], state_dtype=torch.float32)
    param.grad = torch.randn_like(param)
    for _ in range(3):
        optimizer.step()
    saved = snapshot(optimizer)
    momentum = saved["state"][0]["momentum_buffer"]
    assert not torch.equal(momentum, momentum.bfloat16().float())

    same = libmuon.Muon([param], state_dtype=torch.float32)
    same.load_state_dict(saved)
    assert torch.equal(same.state[param]["momentum_buffer"], momentum)
    assert same.state[param]["momentum_buffer"].dtype == torch.float32

    plain = libmuon.Muon([param])
    plain.load_state_dict(saved)
    assert plain.state[param]["momentum_buffer"].dtype == torch.bfloat16
    assert torch.equal(plain.state[param]["momentum_buffer"], momentum.bfloat16())


def test_how_a_run_stores_and_computes_is_not_in_the_file():
    (matrix, gain), optimizer = trained(momentum=0.7, foreach=False, form="standard")
    other = libmuon.Muon(groups_for((matrix, gain)), batch_size=2, state_dtype="float64")
    other.load_state_dict(optimizer.state_dict())
    group = other.param_groups[0]
    assert group["momentum"] == 0.7
    assert (group["foreach"], group["batch_size"]) == (None, 2)
    assert (group["form"], group["state_dtype"]) == ("auto", "float64")
    assert other.state[matrix]["momentum_buffer"].dtype == torch.float64


def test_e14_loaded_state_shares_no_memory_with_the_file():
    (matrix, gain), optimizer = trained()
    saved = optimizer.state_dict()
    before = copy.deepcopy(saved)
    other = libmuon.Muon(groups_for((matrix, gain)))
    other.load_state_dict(saved)
    other.step()
    other.param_groups[0]["lr"] = 5.0
    assert_same(saved, before)
    assert_same(optimizer.state_dict(), before)


def test_e10_loading_many_times_leaves_one_state():
    (matrix, gain), optimizer = trained()
    saved = snapshot(optimizer)
    for _ in range(100):
        optimizer.load_state_dict(saved)
    assert set(optimizer.state) == {matrix, gain}
    assert_same(optimizer.state_dict(), saved)


def without_group(saved):
    del saved["param_groups"][1]
    return "different number of parameter groups"


def short_group(saved):
    saved["param_groups"][1]["params"] = []
    return "doesn't match the size of"


def wrong_shape(saved):
    saved["state"][0]["momentum_buffer"] = torch.zeros(3, 4)
    return r"momentum_buffer of shape \(3, 4\).* for matrix, expected \(4, 3\)"


def missing_key(saved):
    del saved["state"][1]["exp_avg_sq"]
    return r"state \['exp_avg', 'max_exp_avg_sq', 'step'\] for gain"


def extra_key(saved):
    saved["state"][0]["variance_neuron"] = torch.zeros(4, 1)
    return r"state \['momentum_buffer', 'variance_neuron'\] for matrix"


def not_a_tensor(saved):
    saved["state"][0]["momentum_buffer"] = "corrupt"
    return "a str as momentum_buffer of matrix"


def complex_state(saved):
    saved["state"][0]["momentum_buffer"] = torch.zeros(4, 3, dtype=torch.complex64)
    return "complex64 for matrix"


def other_algorithm(saved):
    saved["param_groups"][0]["algorithm"] = "normuon"
    return "algorithm 'normuon' for a group that this optimizer trains with 'muon': matrix"


def bad_value(saved):
    saved["param_groups"][0]["momentum"] = 1.5
    return "momentum should be <= 1"


def bad_layout(saved):
    saved["param_groups"][0]["split_sizes"] = (9, 9)
    return "split_sizes must sum.*matrix"


@pytest.mark.parametrize(
    "spoil",
    [
        without_group,
        short_group,
        wrong_shape,
        missing_key,
        extra_key,
        not_a_tensor,
        complex_state,
        other_algorithm,
        bad_value,
        bad_layout,
    ],
)
def test_e6_a_file_that_does_not_fit_changes_nothing_and_names_the_parameter(spoil):
    _, optimizer = trained()
    _, source = trained()
    saved = snapshot(source)
    text = spoil(saved)
    before = snapshot(optimizer)
    with pytest.raises(ValueError, match=text):
        optimizer.load_state_dict(saved)
    assert_same(optimizer.state_dict(), before)


def test_all_four_hooks_run_and_see_what_they_should():
    (matrix, gain), optimizer = trained()
    saved = snapshot(optimizer)
    other = libmuon.Muon(groups_for((matrix, gain)))
    calls = []

    def rename(_, state_dict):
        calls.append("load_pre")
        return {"state": state_dict["theirs"], "param_groups": state_dict["param_groups"]}

    def after(optimizer):
        calls.append("load_post")
        assert torch.equal(
            optimizer.state[matrix]["momentum_buffer"], saved["state"][0]["momentum_buffer"]
        )

    other.register_load_state_dict_pre_hook(rename)
    other.register_load_state_dict_post_hook(after)
    other.register_state_dict_pre_hook(lambda _: calls.append("save_pre"))
    other.register_state_dict_post_hook(lambda _, d: {**d, "extra": calls.append("save_post")})
    other.load_state_dict(
        state_dict={"theirs": saved["state"], "param_groups": saved["param_groups"]}
    )
    assert "extra" in other.state_dict()
    assert calls == ["load_pre", "load_post", "save_pre", "save_post"]
    assert len(other._optimizer_load_state_dict_pre_hooks) == 1


def test_metadata_of_the_run_survives_a_load():
    (matrix, gain), optimizer = trained()
    saved = optimizer.state_dict()
    other = libmuon.Muon(groups_for((matrix, gain)))
    torch.optim.lr_scheduler.ExponentialLR(other, 0.5)
    other.load_state_dict(saved)
    assert other.param_groups[0]["initial_lr"] == 0.1
    assert other.param_groups[0]["param_names"] == ["matrix"]


def test_state_of_torch_adamw_goes_into_an_adamw_group():
    gain = parameter(3)
    torchs = torch.optim.AdamW([gain], lr=0.02, betas=(0.8, 0.9), weight_decay=0.1)
    gain.grad = torch.randn(3)
    torchs.step()
    ours = libmuon.Muon([{"params": [gain], "algorithm": "adamw", "lr": 0.5}])
    ours.load_state_dict(torchs.state_dict())
    assert ours.param_groups[0]["betas"] == (0.8, 0.9)
    expected = nn.Parameter(gain.detach().clone())
    twin = torch.optim.AdamW([expected])
    twin.load_state_dict(torchs.state_dict())
    expected.grad = gain.grad.clone()
    twin.step()
    ours.step()
    torch.testing.assert_close(gain, expected, rtol=1e-6, atol=1e-7)


def test_strides_of_the_state_are_the_parameters_after_a_load():
    param = nn.Parameter(torch.randn(8, 3, 3, 3).to(memory_format=torch.channels_last))
    param.grad = torch.randn_like(param)
    optimizer = libmuon.Muon([param], flatten=True)
    optimizer.step()
    saved = snapshot(optimizer)
    momentum = saved["state"][0]["momentum_buffer"]
    saved["state"][0]["momentum_buffer"] = momentum.contiguous()
    optimizer.load_state_dict(saved)
    loaded = optimizer.state[param]["momentum_buffer"]
    assert loaded.stride() == param.stride()
    assert torch.equal(loaded, momentum)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.second = nn.Linear(8, 4)

    def forward(self, x):
        return self.second(self.first(x).tanh())


def step(model, optimizer):
    optimizer.zero_grad()
    generator = torch.Generator().manual_seed(1)
    model(torch.randn(5, 6, generator=generator)).square().sum().backward()
    optimizer.step()


@pytest.mark.parametrize("flatten", [False, True])
def test_distributed_checkpoint_round_trip_on_one_process(flatten):
    model = Model()
    optimizer = libmuon.Muon(model, lr=0.01)
    options = dcp.StateDictOptions(flatten_optimizer_state_dict=flatten)
    step(model, optimizer)
    step(model, optimizer)
    saved = copy.deepcopy(dcp.get_optimizer_state_dict(model, optimizer, options=options))

    resumed = Model()
    resumed.load_state_dict(model.state_dict())
    other = libmuon.Muon(resumed, lr=0.5)
    before = copy.deepcopy(resumed.state_dict())
    dcp.set_optimizer_state_dict(resumed, other, saved, options=options)
    torch.testing.assert_close(resumed.state_dict(), before, rtol=0, atol=0)
    assert [g["lr"] for g in other.param_groups] == [g["lr"] for g in optimizer.param_groups]
    step(model, optimizer)
    step(resumed, other)
    for param, twin in zip(model.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(param, twin)


def test_weights_only_loading_is_enough():
    _, optimizer = trained()
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    assert_same(torch.load(file, weights_only=True), optimizer.state_dict())


@pytest.mark.parametrize(
    ("options", "keys"),
    [
        ({}, {"momentum_buffer"}),
        ({"algorithm": "normuon"}, {"momentum_buffer", "variance_neuron"}),
        ({"algorithm": "adamw"}, {"exp_avg", "exp_avg_sq", "step"}),
        ({"state_dtype": "int4"}, {"momentum_buffer", "momentum_buffer_scale"}),
        ({"stochastic_rounding": True}, {"momentum_buffer", "step"}),
        ({"master": "split"}, {"momentum_buffer", "param_remainder"}),
    ],
)
def test_e1_state_keys_are_the_documented_ones(options, keys):
    param = torch.zeros(4, 6, dtype=torch.bfloat16).requires_grad_()
    optimizer = libmuon.Muon([param], **options)
    assert set(optimizer.state_dict()["state"][0]) == keys


def test_e7_schedules_resume_from_the_base_rate_of_each_group():
    def build(model):
        matrices, vectors = {"params": [model.first.weight]}, {"params": [model.first.bias]}
        optimizer = libmuon.Muon(
            [matrices | {"lr": 0.02}, vectors | {"algorithm": "adamw", "lr": 0.001}]
        )
        return optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)

    model = Model()
    optimizer, schedule = build(model)
    for _ in range(4):
        optimizer.step()
        schedule.step()
    other, resumed = build(Model())
    other.load_state_dict(optimizer.state_dict())
    resumed.load_state_dict(schedule.state_dict())
    for _ in range(4):
        for o, s in ((optimizer, schedule), (other, resumed)):
            o.step()
            s.step()
        rates = [[g["lr"] for g in o.param_groups] for o in (optimizer, other)]
        assert rates[0] == rates[1]
    assert resumed.base_lrs == [0.02, 0.001]
    with pytest.raises(ValueError, match="more than one parameter group"):
        optimizer.add_param_group({"params": [model.first.weight]})


def test_e9_one_state_dict_holds_matrices_and_the_rest():
    _, optimizer = trained()
    saved = snapshot(optimizer)
    assert {group["algorithm"] for group in saved["param_groups"]} == {"muon", "adamw"}
    _, other = trained(steps=0)
    other.load_state_dict(saved)
    assert_same(other.state_dict(), saved)
