"""When a plan is built, how often it is used, and when it is freed."""

from __future__ import annotations

import gc
import weakref

import libmuon
import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile


def parameter(*shape, **kwargs):
    return nn.Parameter(torch.randn(*shape, **kwargs))


def with_grads(*params):
    for param in params:
        param.grad = torch.randn_like(param)
    return list(params)


def count_ops(action):
    """How often each op of libmuon is called."""
    with profile(activities=[ProfilerActivity.CPU]) as trace:
        action()
    return {e.key: e.count for e in trace.key_averages() if e.key.startswith("muon::")}


def test_a_step_is_one_call_however_many_groups():
    params = with_grads(*[parameter(4, 3) for _ in range(9)])
    groups = [{"params": [p], "lr": 0.1 / (i + 1)} for i, p in enumerate(params)]
    groups.append({"params": with_grads(parameter(3)), "algorithm": "adamw", "lr": 0.01})
    optimizer = libmuon.Muon(groups)
    assert count_ops(optimizer.step)["muon::step_"] == 1


def test_plan_is_built_once_and_again_only_for_new_parameters_or_structure():
    first, second = with_grads(parameter(4, 3), parameter(5, 3))
    optimizer = libmuon.Muon([first])

    def plans():
        return count_ops(optimizer.step).get("muon::create_plan", 0)

    assert plans() == 1
    for lr in (0.1, 0.2):
        optimizer.param_groups[0].update(lr=lr, momentum=0.9, weight_decay=0.0, nesterov=False)
        first.grad = None if lr == 0.1 else torch.randn_like(first)
        assert plans() == 0
    optimizer.add_param_group({"params": [second]})
    assert plans() == 1
    optimizer.param_groups[1]["ns_steps"] = 4
    assert plans() == 1
    optimizer.param_groups[1]["params"][0] = with_grads(parameter(5, 3))[0]
    assert plans() == 1
    optimizer.load_state_dict(optimizer.state_dict())
    assert plans() == 0


def test_optimizer_and_its_plan_are_freed_together():
    optimizer = libmuon.Muon(with_grads(parameter(4, 3)))
    optimizer.step()
    handle = optimizer._plan.handle
    assert torch.ops.muon.explain_plan(handle)
    gone = weakref.ref(optimizer)
    del optimizer
    gc.collect()
    assert gone() is None
    with pytest.raises(ValueError, match="handle of a live plan"):
        torch.ops.muon.explain_plan(handle)


@pytest.mark.parametrize(
    ("options", "batches"),
    [
        ({}, [5]),
        ({"foreach": True}, [5]),
        ({"foreach": False}, [1] * 5),
        ({"batch_size": 2}, [2, 2, 1]),
    ],
)
def test_foreach_and_batch_size_say_how_many_matrices_share_a_batch(options, batches):
    optimizer = libmuon.Muon(with_grads(*[parameter(4, 3) for _ in range(5)]), **options)
    optimizer.step()
    plan = torch.ops.muon.explain_plan(optimizer._plan.handle)
    assert [int(line.split()[2]) for line in plan.splitlines() if line] == batches
