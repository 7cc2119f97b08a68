"""`libmuon.orthogonalize` against its definition, and at the edges of range, shape and dtype."""

import libmuon
import pytest
import torch
from reference import exact_orthogonalize, polynomial, relative_error, steepest_slope

TRIPLE = (3.4445, -4.775, 2.0315)
NORMALIZATION = {
    "muon": ("clamp", 1.0),
    "polar_express": ("add", 1.02),
    "polar_express_paper": ("add", 1.01),
    "you": ("clamp", 1.0),
    "cans": ("clamp", 1.01),
}
SCHEDULES = libmuon.schedules()
FORMS = ["auto", "standard", "gram", "gram_x_restart"]
SHAPES = [(1, 1), (1, 9), (9, 1), (7, 7), (5, 12), (12, 5), (64, 65), (70, 66), (66, 150), (200, 3)]


def tolerance(dtype, schedule="muon", form="auto"):
    """What rounding may cost on Gaussian matrices.

    Singular values move by some eps and the result by that times the slope of the polynomial.
    Without restart a Gram matrix takes more, by what its run multiplies it by.
    """
    slope = steepest_slope(SCHEDULES[schedule], NORMALIZATION[schedule][1])
    return (500 if form == "gram" else 5) * slope * torch.finfo(dtype).eps


def exact(x, schedule="muon", **options):
    normalization, norm_factor = NORMALIZATION[schedule]
    rows = SCHEDULES[schedule]
    return exact_orthogonalize(x, rows, normalization, norm_factor, **options)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_a5_every_shape_schedule_and_form(dtype, schedule):
    for shape in SHAPES:
        x = torch.randn(shape, dtype=dtype)
        expected = exact(x, schedule)
        for form in FORMS:
            got = libmuon.orthogonalize(x, schedule, form=form)
            assert got.dtype == dtype
            error = relative_error(got, expected)
            assert error <= tolerance(dtype, schedule, form), (shape, form)


def test_a5_float64_meets_the_definition_to_1e_10():
    x = torch.randn(50, 80, dtype=torch.float64)
    assert relative_error(libmuon.orthogonalize(x), exact(x)) <= 1e-12


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a1_zero_stays_zero_alone_and_in_a_batch(schedule, form):
    assert libmuon.orthogonalize(torch.zeros(8, 20), schedule, form=form).count_nonzero() == 0
    assert libmuon.orthogonalize(torch.zeros(8, 20), schedule, eps=0.0).count_nonzero() == 0
    x = torch.randn(3, 8, 20)
    before = libmuon.orthogonalize(x, schedule, form=form)
    x[1] = 0
    after = libmuon.orthogonalize(x, schedule, form=form)
    assert after[1].count_nonzero() == 0
    assert torch.equal(after[0], before[0])
    assert torch.equal(after[2], before[2])


@pytest.mark.parametrize("compute_dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a7_a_largest_singular_value_just_above_one_does_not_run_away(schedule, compute_dtype):
    """A matrix of rank one has a singular value of 1 after the norm; 16-bit rounding lifts it."""
    for x in (torch.full((3, 40), 1.003), torch.full((1, 7), 0.3), torch.full((40, 40), 1.001)):
        got = libmuon.orthogonalize(x, schedule, compute_dtype=compute_dtype)
        assert torch.linalg.matrix_norm(got.double(), 2) <= 1.6, x.shape


@pytest.mark.parametrize("schedule", ["muon", "you"])
@pytest.mark.parametrize("top", [1.0, 1.02, 1.05])
def test_a7_schedules_without_a_safety_factor_bear_five_percent(schedule, top):
    x = torch.diag(torch.tensor([1.0, 0.5, 0.2, 0.01]))
    x = x / torch.linalg.matrix_norm(x, 2)
    factor = (1 / top / torch.linalg.matrix_norm(x)).item()  # the top one becomes `top`
    got = libmuon.orthogonalize(x, schedule, norm_factor=factor, compute_dtype="bfloat16")
    assert torch.linalg.matrix_norm(got.double(), 2) <= 1.6


def test_a8_the_scale_of_the_input_does_not_matter():
    x = torch.randn(40, 60)
    expected = libmuon.orthogonalize(x)
    assert torch.equal(libmuon.orthogonalize(x * 2.0**20), expected)
    assert relative_error(libmuon.orthogonalize(100 * x), expected) <= tolerance(torch.float32)
    assert relative_error(x, expected) > 0.5  # and it is not the input


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128], ids=str)
def test_a9_complex_matrices_and_their_unitary_invariance(dtype):
    x = torch.randn(5, 9, dtype=dtype)
    got = libmuon.orthogonalize(x)
    assert got.dtype == dtype
    assert relative_error(got, exact(x)) <= tolerance(dtype)
    u, _ = torch.linalg.qr(torch.randn(5, 5, dtype=dtype))
    v, _ = torch.linalg.qr(torch.randn(9, 9, dtype=dtype))
    assert relative_error(libmuon.orthogonalize(u @ x @ v), u @ got @ v) <= tolerance(dtype)
    pairs = libmuon.orthogonalize(torch.view_as_real(x), complex_dim=-1)
    assert relative_error(torch.view_as_complex(pairs), got) <= tolerance(dtype)


def test_a10_steps_take_the_first_rows_and_repeat_the_last():
    rows = [(1.5 + k / 50, -0.5 - k / 70, 0.1 + k / 90) for k in range(8)]
    x = torch.randn(6, 10, dtype=torch.float64)
    first = libmuon.orthogonalize(x, rows, ns_steps=5)
    assert torch.equal(first, libmuon.orthogonalize(x, rows[:5]))
    assert relative_error(first, exact_orthogonalize(x, rows[:5])) <= 1e-13
    assert relative_error(first, exact_orthogonalize(x, rows[3:])) > 1e-3
    longer = libmuon.orthogonalize(x, rows, ns_steps=10)
    assert torch.equal(longer, libmuon.orthogonalize(x, [*rows, rows[-1], rows[-1]]))
    none = libmuon.orthogonalize(x, rows, ns_steps=0)
    assert relative_error(none, x / torch.linalg.matrix_norm(x)) <= 1e-15


def test_a11_schedules_by_value():
    assert SCHEDULES["muon"] == (TRIPLE,) * 5
    assert SCHEDULES["polar_express"][0] == (
        8.156554524902461,
        -22.48329292557795,
        15.878769915207462,
    )
    assert [len(SCHEDULES[name]) for name in NORMALIZATION] == [5, 5, 8, 5, 5]
    assert list(SCHEDULES) == list(NORMALIZATION)


@pytest.mark.parametrize(
    ("schedule", "low", "high"),
    [
        ("muon", 0.68183, 1.13436),
        ("polar_express", 0.85887, 1.14113),
        ("polar_express_paper", 1.0, 1.0),
        ("you", 0.97775, 1.03178),
        ("cans", 0.88437, 1.11984),
    ],
)
def test_a11_schedules_by_their_band(schedule, low, high):
    factor = NORMALIZATION[schedule][1]
    sigma = torch.linspace(0.01, 1, 50001, dtype=torch.float64)
    y = polynomial(sigma / factor, SCHEDULES[schedule])
    assert abs(y.min().item() - low) < 2e-5
    assert abs(y.max().item() - high) < 2e-5


def test_a19_scratch_memory_is_never_read():
    """torch fills what it hands out uninitialised with NaN in its deterministic mode."""
    x = torch.randn(2, 70, 150)
    expected = [libmuon.orthogonalize(x, form=form) for form in FORMS]
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.empty(4).isnan().all()
        for form, result in zip(FORMS, expected, strict=True):
            assert torch.equal(libmuon.orthogonalize(x, form=form), result), form
            half = libmuon.orthogonalize(x[:, :20].half(), form=form)
            assert half.isfinite().all()
    finally:
        torch.use_deterministic_algorithms(False)


def test_a20_a_row_vector_becomes_0_6964_of_its_unit_vector():
    got = libmuon.orthogonalize(torch.tensor([[3.0, 4.0]], dtype=torch.float64))
    expected = torch.tensor([[0.41786, 0.55715]], dtype=torch.float64)
    torch.testing.assert_close(got, expected, rtol=0, atol=5e-6)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("shape", [(4, 9, 21), (2, 3, 70, 66), (1, 5, 5)])
def test_b13_b15_a_batch_equals_its_matrices(schedule, form, shape):
    x = torch.randn(shape)
    got = libmuon.orthogonalize(x, schedule, form=form).reshape(-1, *shape[-2:])
    for matrix, result in zip(x.reshape(got.shape), got, strict=True):
        assert torch.equal(libmuon.orthogonalize(matrix, schedule, form=form), result)


@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (0, 0), (0, 4, 6), (3, 0, 6), (3, 4, 0)])
def test_b22_empty_matrices(shape):
    assert libmuon.orthogonalize(torch.randn(shape)).shape == shape


# --- range ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "scale", "bound"),
    [
        (torch.float32, 1e38 / 8, 1e-4),
        (torch.float32, 1e-38, 1e-4),
        (torch.float32, 1e-30, 1e-4),
        (torch.float64, 1e300, 1e-11),
        (torch.float64, 1e-300, 1e-11),
        (torch.bfloat16, 1e38 / 8, 0.03),
        (torch.bfloat16, 1e-37, 0.03),
        (torch.float16, 8000.0, 0.01),
        (torch.complex64, 1e37, 1e-4),
        (torch.complex64, 1e-37, 1e-4),
    ],
    ids=str,
)
def test_entries_at_the_edges_of_the_range_neither_overflow_nor_vanish(dtype, scale, bound):
    x = torch.randn(30, 50, dtype=torch.complex128 if dtype.is_complex else torch.float64)
    got = libmuon.orthogonalize((scale * x).to(dtype), eps=0.0)
    assert relative_error(got, exact(x)) <= bound


@pytest.mark.parametrize("compute_dtype", ["float16", "bfloat16"])
def test_sixteen_bit_products_of_matrices_at_the_edges(compute_dtype):
    x = torch.randn(30, 50)
    for scale in (1e-37, 1e37):
        got = libmuon.orthogonalize(scale * x, eps=0.0, compute_dtype=compute_dtype)
        assert relative_error(got, exact(x)) <= 0.06


def test_eps_zero_is_scale_free_and_eps_is_a_lower_bound_of_the_norm():
    x = torch.randn(6, 10, dtype=torch.float64)
    free = libmuon.orthogonalize(x, eps=0.0)
    assert torch.equal(libmuon.orthogonalize(x * 2.0**-300, eps=0.0), free)
    tiny = x * 2.0**-30
    clamped = libmuon.orthogonalize(tiny, eps=1e-3)
    assert relative_error(clamped, exact_orthogonalize(tiny, [TRIPLE] * 5, eps=1e-3)) <= 1e-12
    assert torch.linalg.matrix_norm(clamped) < 1e-2


# --- dtypes, strides, non-finite values ----------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_a2_sixteen_bit_tensors_cost_one_rounding(dtype):
    x = torch.randn(40, 70).to(dtype)
    got = libmuon.orthogonalize(x)
    assert got.dtype == dtype
    assert relative_error(got, exact(x)) <= torch.finfo(dtype).eps / 2 + 1e-4


@pytest.mark.parametrize(
    ("compute_dtype", "bound"),
    [("float64", 2.0**-23), (torch.float32, 1e-4), ("float16", 0.01), (torch.bfloat16, 0.06)],
)
def test_a6_a17_compute_dtype_bounds_the_error(compute_dtype, bound):
    x = torch.randn(40, 70)
    got = libmuon.orthogonalize(x, compute_dtype=compute_dtype)
    assert got.dtype == torch.float32
    assert relative_error(got, exact(x)) <= bound


BASE = (3, 40, 60)
VIEWS = {
    "transposed": lambda t: t.mT,
    "permuted": lambda t: t.permute(1, 0, 2),
    "row_steps": lambda t: t[:, 5:37:2],
    "column_steps": lambda t: t[..., 3:50:3],
    "offset": lambda t: t[1, 1:],
    "expanded_batch": lambda t: t[0].expand(4, 40, 60),
    "expanded_rows": lambda t: t[0, 0].expand(7, 60),
    "expanded_columns": lambda t: t[0, :, :1].expand(40, 9),
}


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS.keys())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64], ids=str)
def test_strides_do_not_matter_and_the_input_stays(view, dtype):
    x = view(torch.randn(BASE, dtype=dtype))
    copy = x.clone(memory_format=torch.contiguous_format)
    assert torch.equal(libmuon.orthogonalize(x), libmuon.orthogonalize(copy))
    assert torch.equal(x, copy)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_non_finite_matrix_leaves_the_others_of_its_batch_alone(form, bad):
    for size in (20, 70):
        x = torch.randn(3, size, 80)
        before = libmuon.orthogonalize(x, form=form)
        x[1, 7, 5] = bad
        after = libmuon.orthogonalize(x, form=form)
        assert not after[1].isfinite().all()
        assert torch.equal(after[0], before[0])
        assert torch.equal(after[2], before[2])


def test_no_graph_is_recorded():
    assert not libmuon.orthogonalize(torch.randn(4, 6, requires_grad=True)).requires_grad


# --- errors --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tensor", "options", "error", "text"),
    [
        (torch.zeros(2, 2, dtype=torch.int32), {}, TypeError, "Int"),
        (torch.zeros(4), {}, ValueError, "at least 2 dims"),
        (torch.zeros(2, 2), {"ns_steps": -1}, ValueError, "-1"),
        (torch.zeros(2, 2), {"eps": -1.0}, ValueError, "-1"),
        (torch.zeros(2, 2), {"ns_coefficients": "quintic"}, ValueError, "polar_express"),
        (torch.zeros(2, 2), {"ns_coefficients": (1.0, 2.0)}, ValueError, "ns_coefficients"),
        (torch.zeros(2, 2), {"norm_factor": 0.0}, ValueError, "norm_factor"),
        (torch.zeros(2, 2), {"normalization": "divide"}, ValueError, "clamp"),
        (torch.zeros(2, 2), {"form": "gramm"}, ValueError, "standard"),
        (torch.zeros(2, 2), {"compute_dtype": "float16", "form": "gram"}, ValueError, "gram"),
        (torch.zeros(2, 2).to_sparse(), {}, (ValueError, RuntimeError), "parse"),
    ],
)
def test_bad_inputs_are_refused_with_their_value(tensor, options, error, text):
    with pytest.raises(error, match=text):
        libmuon.orthogonalize(tensor, **options)
