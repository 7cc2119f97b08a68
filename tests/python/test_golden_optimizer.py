"""Golden data of whole steps, through `libmuon.Muon`."""

import golden
import libmuon
import pytest
import torch

FILES = ("torch_muon", "muonium_muon", "muonium_normuon", "neuralops_qkan_adamw")
CASES = [case for case in golden.cases(*FILES) if golden.is_supported(case)]
STATE = ("momentum_buffer", "variance_neuron", "exp_avg", "exp_avg_sq")


def build(case, **changes):
    """(optimizer, parameters by name); `changes` apply to the Muon group."""
    params = {k: torch.nn.Parameter(v.clone()) for k, v in case.inputs["params"].items()}
    groups = []
    for kind in ("muon", "adamw"):
        members = [(name, params[name]) for name, r in case.options["route"].items() if r == kind]
        if not members:
            continue
        if kind == "muon":
            options = golden.muon_options(case.options["muon"], members[0][1].ndim) | changes
        else:
            options = golden.adamw_options(case.options["adamw"])
        groups.append({"params": members, **options})
    return libmuon.Muon(groups), params


def set_grads(params, grads):
    for name, param in params.items():
        param.grad = None if grads[name] is None else grads[name].clone()


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a15_a16_d13_parameters_and_state_after_every_step(case):
    optimizer, params = build(case)
    for t, (grads, expected) in enumerate(
        zip(case.inputs["grads"], case.expected["steps"], strict=True), start=1
    ):
        set_grads(params, grads)
        optimizer.step()
        for name, param in params.items():
            where = f"of {name} after step {t}"
            case.check(param.detach(), expected["params"][name], "params", where)
            for key in STATE:
                if name in expected.get(key, {}):
                    got = optimizer.state[param][key]
                    case.check(got, expected[key][name], key, where)
            if grads[name] is not None:
                assert torch.equal(param.grad, grads[name]), f"the gradient {where} changed"


@pytest.mark.parametrize("case", [c for c in CASES if "muon" in c.options], ids=str)
def test_update_before_lr_and_decay(case):
    """With lr 1, no factor, no decay and a zero parameter, a step leaves minus its update there."""
    optimizer, params = build(case, lr=1.0, weight_decay=0.0, adjust_lr_fn="unscaled")
    for t, (grads, expected) in enumerate(
        zip(case.inputs["grads"], case.expected["steps"], strict=True), start=1
    ):
        set_grads(params, grads)
        for param in params.values():
            param.detach().zero_()
        optimizer.step()
        for name, update in expected["update"].items():
            got = params[name].detach().neg()
            case.check(got, update, "update", f"of {name} in step {t}")


@pytest.mark.parametrize("case", golden.cases("momentum_conversion"), ids=str)
class TestMomentumForms:
    """No iterations and a bound of the norm above every norm: the step is what goes into them."""

    @staticmethod
    def build(case, form):
        param = torch.nn.Parameter(torch.zeros_like(case.inputs["grads"][0]))
        optimizer = libmuon.Muon(
            [param],
            lr=64.0,
            eps=64.0,  # a power of two: dividing by it and multiplying by lr is exact
            weight_decay=0.0,
            ns_steps=0,
            adjust_lr_fn="unscaled",
            nesterov=case.options["nesterov"],
            momentum_form=form,
        )
        return optimizer, param

    @staticmethod
    def step(case, optimizer, param, t):
        param.detach().zero_()
        optimizer.param_groups[0]["momentum"] = case.options["momentum"][t]
        param.grad = case.inputs["grads"][t]
        optimizer.step()
        return optimizer.state[param]["momentum_buffer"]

    @pytest.mark.parametrize("form", ["ema", "heavy_ball"])
    def test_d21_both_forms_step_by_step(self, case, form):
        optimizer, param = self.build(case, form)
        for t, expected in enumerate(case.expected["steps"]):
            buffer = self.step(case, optimizer, param, t)
            case.check(buffer, expected[form], form, f"after step {t + 1}")
            quantity = f"ortho_input_{form}"
            case.check(param.detach().neg(), expected[quantity], quantity, f"in step {t + 1}")

    @pytest.mark.parametrize("form", ["ema", "heavy_ball"])
    def test_d21_a_checkpoint_converts_by_one_minus_mu(self, case, form):
        other = "heavy_ball" if form == "ema" else "ema"
        after = case.options["convert_after_step"]
        ratio = 1 - case.options["momentum"][after - 1]
        optimizer, param = self.build(case, other)
        for t in range(after):
            self.step(case, optimizer, param, t)

        saved = optimizer.state_dict()
        buffer = saved["state"][0]["momentum_buffer"]
        buffer.mul_(ratio) if form == "ema" else buffer.div_(ratio)
        optimizer, param = self.build(case, form)
        saved["param_groups"] = optimizer.state_dict()["param_groups"]
        optimizer.load_state_dict(saved)
        expected = case.expected["conversion"]
        name = "heavy_ball_as_ema" if form == "ema" else "ema_as_heavy_ball"
        case.check(optimizer.state[param]["momentum_buffer"], expected[name], "conversion", name)
        name = f"next_{form}_after_conversion"
        case.check(self.step(case, optimizer, param, after), expected[name], "conversion", name)
