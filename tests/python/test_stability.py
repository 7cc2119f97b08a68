"""Fifteen hard inputs, every form and precision, against the exact scalar polynomial."""

import functools
import os

import libmuon
import pytest
import torch
from reference import (
    Spectrum,
    exact_orthogonalize,
    polynomial,
    relative_error,
    torch_bfloat16,
)
from stability_inputs import INPUTS, stability_input

SCHEDULES = libmuon.schedules()
# The paper's table with a safety factor of 1.05, as Dao-AILab/gram-newton-schulz ships it.
PAPER_ROWS = [(1.01 * a, 1.01**3 * b, 1.01**5 * c) for a, b, c in SCHEDULES["polar_express_paper"]]
SAFE_ROWS = tuple((a / 1.05, b / 1.05**3, c / 1.05**5) for a, b, c in PAPER_ROWS[:5])

# name -> (coefficients, factor on the norm, largest error in float32)
TABLE = {
    "muon": (SCHEDULES["muon"], 1.0, 7e-4),
    "you": (SCHEDULES["you"], 1.0, 2.5e-3),
    "polar_express_1.05": (SAFE_ROWS, 1.0, 9e-3),
    "polar_express": (SCHEDULES["polar_express"], 1.02, 9e-3),
    "polar_express_paper": (SCHEDULES["polar_express_paper"], 1.01, 9e-3),
    "cans": (SCHEDULES["cans"], 1.01, 9e-3),
}
# Those whose coefficients grow slowly enough for a run of five steps.
NO_RESTART = ("muon", "you", "polar_express_1.05")
# The inputs on which the forms differ most; the others add seconds and nothing else at large n.
WORST = ("repeated_rows", "ones_noise", "positive_rank_64")
SIZES = [(n, name) for n in (64, 128, 256) for name in INPUTS]
SIZES += [(n, name) for n in (512, 1024) for name in WORST]


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Most of these matrices are too small for two threads, which would wait for one another."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def schedules(n):
    """All of them where they are cheap."""
    return TABLE if n <= 256 else ("muon", "you", "polar_express_1.05")


@functools.lru_cache(maxsize=2)
def problem(n, name, dtype):
    """The input, n x 2n, as a tensor of `dtype`, and its decomposition."""
    seed = int(os.environ.get("MUON_TEST_SEED", "0"))
    torch.manual_seed(1000 * seed + n)
    x = stability_input(name, n, 2 * n).to(dtype)
    return x, Spectrum(x)


def run(x, schedule, **options):
    rows, norm_factor, _ = TABLE[schedule]
    return libmuon.orthogonalize(x, rows, norm_factor=norm_factor, eps=0.0, **options)


@pytest.mark.parametrize(("n", "name"), SIZES)
def test_a13_float32_forms_stay_within_their_bounds(n, name):
    x, spectrum = problem(n, name, torch.float32)
    for schedule in schedules(n):
        rows, norm_factor, bound = TABLE[schedule]
        exact = spectrum.orthogonalized(rows, norm_factor)
        forms = ["auto"] if n == 1024 else ["auto", "standard", "gram_x_restart"]
        for form in [*forms, "gram"] if schedule in NO_RESTART else forms:
            error = relative_error(run(x, schedule, form=form), exact)
            assert error <= bound, f"{schedule} {form}: {error:.1e}"


@pytest.mark.parametrize(("n", "name"), [s for s in SIZES if s[0] < 512])
def test_a6_sixteen_bit_forms_are_never_worse_than_torchs_bfloat16(n, name):
    x, spectrum = problem(n, name, torch.float32)
    for schedule, (rows, norm_factor, _) in TABLE.items():
        exact = spectrum.orthogonalized(rows, norm_factor)
        allowed = relative_error(torch_bfloat16(x, rows, norm_factor), exact)
        for dtype, form in (
            ("float16", "auto"),
            ("float16", "standard"),
            ("float16", "gram_x_restart"),
            ("bfloat16", "auto"),
            ("bfloat16", "standard"),
        ):
            got = run(x, schedule, form=form, compute_dtype=dtype)
            error = relative_error(got, exact)
            assert error <= allowed, f"{schedule} {dtype} {form}: {error:.2e} > {allowed:.2e}"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", INPUTS)
def test_a2_sixteen_bit_tensors_are_never_worse_than_torchs_bfloat16(name, dtype):
    x, spectrum = problem(128, name, dtype)
    for schedule, (rows, norm_factor, _) in TABLE.items():
        exact = spectrum.orthogonalized(rows, norm_factor)
        allowed = relative_error(torch_bfloat16(x, rows, norm_factor), exact)
        assert relative_error(run(x, schedule), exact) <= allowed, schedule


@pytest.mark.parametrize("name", INPUTS)
def test_the_emulation_of_torchs_bfloat16_is_right(name):
    """Its error against the real one's, which takes long where bfloat16 products are slow."""
    x, spectrum = problem(64, name, torch.float32)
    exact = spectrum.orthogonalized(SCHEDULES["muon"])
    triple = SCHEDULES["muon"][0]
    real = torch.optim._muon._zeropower_via_newtonschulz(x, triple, 5, 1e-7)
    emulated = torch_bfloat16(x, SCHEDULES["muon"])
    real_error, error = relative_error(real, exact), relative_error(emulated, exact)
    assert real_error / 1.25 <= error <= 1.25 * real_error


@pytest.mark.parametrize("name", ["gaussian", "log_3", "rank_10", "ones_noise"])
def test_the_reference_agrees_with_a_singular_value_decomposition(name):
    x, spectrum = problem(64, name, torch.float32)
    for rows, norm_factor, _ in TABLE.values():
        by_svd = exact_orthogonalize(x, rows, norm_factor=norm_factor)
        for tensor, decomposed in ((x, spectrum), (x.mT, Spectrum(x.mT))):
            expected = by_svd if tensor is x else by_svd.mT
            got = decomposed.orthogonalized(rows, norm_factor)
            assert relative_error(got, expected) <= 1e-9


@pytest.mark.parametrize("steps", range(5, 11))
@pytest.mark.parametrize("condition", [1e6, 1e8, 1e10])
def test_a13_ill_conditioned_matrices_and_many_steps(condition, steps):
    """Every form stays in the polynomials' band and near the standard form.

    Rounding may move a small singular value anywhere in a step's band, so a band is what the step
    makes of the whole band before it.
    """
    n = 96
    u, _ = torch.linalg.qr(torch.randn(n, n, dtype=torch.float64))
    v, _ = torch.linalg.qr(torch.randn(2 * n, n, dtype=torch.float64))
    sigma = torch.logspace(0, -torch.tensor(condition).log10().item(), n, dtype=torch.float64)
    x = ((u * sigma) @ v.mT).float()
    for schedule in ("muon", "polar_express", "polar_express_paper", "you"):
        rows, norm_factor, _ = TABLE[schedule]
        rows = [*rows, *[rows[-1]] * steps][:steps]
        top = 1 / norm_factor
        for row in rows:
            grid = torch.linspace(0, top, 10001, dtype=torch.float64)
            top = polynomial(grid, [row]).max().item()
        standard = run(x, schedule, ns_steps=steps, form="standard")
        for form in ("auto", "gram", "gram_x_restart"):
            got = run(x, schedule, ns_steps=steps, form=form)
            assert got.isfinite().all()
            assert torch.linalg.matrix_norm(got.double(), 2) <= top * 1.01, (schedule, form)
            assert relative_error(got, standard) <= 0.02, (schedule, form)


def test_a_weight_stops_moving_under_zero_gradients_as_with_torch(monkeypatch):
    """One real gradient, then 20,000 zero ones: the norm's lower bound ends the motion."""

    def in_float64(grad, ns_coefficients, ns_steps, eps):
        rows = [ns_coefficients] * ns_steps
        return exact_orthogonalize(grad, rows, eps=eps)

    monkeypatch.setattr(torch.optim._muon, "_zeropower_via_newtonschulz", in_float64)
    start, gradient = torch.randn(4, 3), torch.randn(4, 3)
    results = {}
    for package in (libmuon, torch.optim):
        param = torch.nn.Parameter(start.clone())
        optimizer = package.Muon([param], lr=0.02, weight_decay=0.0)
        param.grad = gradient.clone()
        optimizer.step()
        param.grad = torch.zeros_like(param)
        # torch's momentum is zero after 2,100 steps; its own remaining steps would only take time
        steps = 20_000 if package is libmuon else 2_500
        for step in range(steps):
            optimizer.step()
            if step == steps - 400:
                late = param.detach().clone()
        assert torch.equal(param.detach(), late)
        results[package] = param.detach()
    assert relative_error(results[libmuon], results[torch.optim]) <= 1e-4
    assert relative_error(results[libmuon], start) > 0.1
