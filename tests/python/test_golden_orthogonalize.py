"""Golden data of the iteration and of the shape factors, through the Python API."""

import golden
import libmuon
import pytest
import torch


def named_options(ortho):
    """The case's options with a schedule's name instead of its numbers; None if it has none."""
    options = golden.orthogonalize_options(ortho)
    rows = options.get("ns_coefficients", [])
    known = libmuon.schedules()
    for name in ("muon", "polar_express"):
        table = [*known[name], *[known[name][-1]] * 5][: len(rows)]
        if rows and rows == table:
            return options | {"ns_coefficients": name}
    return None


@pytest.mark.parametrize("case", golden.cases("ns_quintic", "polar_express"), ids=str)
def test_a5_matches_the_exact_polynomial(case):
    x = case.inputs["x"]
    before = x.clone()
    got = libmuon.orthogonalize(x, **golden.orthogonalize_options(case.options))
    assert got.dtype == x.dtype
    assert torch.equal(x, before)
    case.check(got, case.expected["output"], "output")


@pytest.mark.parametrize("case", golden.cases("ns_quintic", "polar_express"), ids=str)
def test_a11_named_schedules_match_their_numbers(case):
    options = named_options(case.options)
    if options is None:
        assert case.options["coefficients"] in ([], [[1.875, -1.25, 0.375]] * 12)
        return
    got = libmuon.orthogonalize(case.inputs["x"], **options)
    case.check(got, case.expected["output"], "output")


@pytest.mark.parametrize(
    "case", golden.cases("ns_quintic", "polar_express", precisions=["bf16"]), ids=str
)
def test_a14_a_bfloat16_iteration_stays_within_its_bounds(case):
    options = golden.orthogonalize_options(case.options)
    got = libmuon.orthogonalize(case.inputs["x"], **options, compute_dtype="bfloat16")
    case.check(got, case.expected["output"], "output")


@pytest.mark.parametrize("case", golden.cases("scale_factors"), ids=str)
def test_d1_d2_b6_a_step_is_scaled_by_the_shape_factor(case):
    """A gradient with a single 1, no iteration and a norm of 1: the step is the factor."""
    dtype = golden.PRECISIONS[case.precision]
    for shape, factor in zip(case.inputs["shapes"], case.expected["factors"], strict=True):
        layout = {}
        if len(shape) > 2:
            flatten = case.options["flatten"]
            layout = {"flatten": True} if flatten else {"batch_dims": len(shape) - 2}
        param = torch.nn.Parameter(torch.zeros(shape, dtype=dtype))
        optimizer = libmuon.Muon(
            [param],
            lr=1.0,
            weight_decay=0.0,
            momentum=0.0,
            ns_steps=0,
            adjust_lr_fn=case.options["scale"],
            **layout,
        )
        param.grad = torch.zeros_like(param)
        param.grad.view(-1)[0] = 1.0
        optimizer.step()
        error = abs(-param.detach().view(-1)[0].item() - factor)
        assert error <= case.tolerance["factors"], (shape, error)
        assert param.count_nonzero() == 1
