"""Quantised momenta and moments: precision, layouts, sizes, resume, formats that change."""

from __future__ import annotations

import io
from typing import Any

import libmuon
import pytest
import torch
from torch import Tensor

FORMATS = ("int8", "int4", "fp8")
BLOCK = 128
# Half the widest gap between two codes' values, as a part of the block's largest value: between the
# two largest squares of int8, the two largest levels of int4, and between 416 and 448 of fp8.
HALF_GAP = {
    "int8": (127**2 - 126**2) / 2 / 127**2,
    "int4": (1 - 0.735) / 2,
    "fp8": 16 / 448,
}
ROUNDING = 1e-6  # of the float32 arithmetic around the codes


def make(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    p = torch.randn(shape).to(dtype).requires_grad_()
    p.grad = torch.randn(shape).to(dtype)
    return p


def group(algorithm: str, params: list[Tensor], **options: Any) -> dict[str, Any]:
    return {"params": params, "algorithm": algorithm, "lr": 0.02, **options}


def plain_state(opt: libmuon.Muon, **options: Any) -> libmuon.Muon:
    """An optimizer with the same state, as float32 numbers."""
    params = [p.detach().clone().requires_grad_() for p in opt.param_groups[0]["params"]]
    keep = ("algorithm", "rows", "cols", "batch_dims", "flatten", "split_sizes", "split_dim")
    own = {k: v for k, v in opt.param_groups[0].items() if k in (*keep, "num_heads", "complex_dim")}
    other = libmuon.Muon([{"params": params, **own, **options}], state_dtype="float32")
    other.load_state_dict(opt.state_dict())
    return other


def state_of(opt: libmuon.Muon, key: str = "momentum_buffer") -> Tensor:
    return opt.state[opt.param_groups[0]["params"][0]][key]


LAYOUTS: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "matrix": ((5, 300), {}),
    "odd": ((3, 129), {}),
    "column": ((200, 1), {}),
    "row": ((1, 257), {}),
    "transposed": ((130, 6), {"rows": 1, "cols": 0}),
    "convolution": ((6, 5, 3, 3), {"flatten": True}),
    "transposed convolution": ((6, 5, 3, 3), {"rows": 1, "cols": (0, 2, 3)}),
    "experts": ((3, 4, 131), {"batch_dims": 1}),
    "outer batches": ((2, 3, 4, 131), {"batch_dims": 2}),
    "batch behind": ((4, 131, 3), {"rows": 0, "cols": 1}),
    "split rows": ((9, 140), {"split_sizes": (2, 3, 4)}),
    "split columns": ((4, 300), {"split_sizes": (131, 169), "split_dim": 1}),
    "split rows of a transposed one": ((4, 300), {"rows": 1, "cols": 0, "split_sizes": (131, 169)}),
    "heads": ((4, 300), {"num_heads": 3, "split_dim": 1}),
    "pairs": ((4, 70, 2), {"rows": 0, "cols": 1, "complex_dim": -1}),
}


@pytest.mark.parametrize("format_name", FORMATS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_codes_are_near_the_momentum_in_every_layout(format_name: str, layout: str) -> None:
    shape, options = LAYOUTS[layout]
    p = make(*shape)
    gradient = p.grad.clone()  # type: ignore[union-attr]
    opt = libmuon.Muon([p], state_dtype=format_name, momentum=0.75, **options)
    opt.step()
    error = (state_of(plain_state(opt)) - gradient / 4).abs()
    assert 0 < error.max() <= (HALF_GAP[format_name] + ROUNDING) * gradient.abs().max() / 4


@pytest.mark.parametrize("format_name", FORMATS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_momenta_that_are_codes_step_as_float32_does(format_name: str, layout: str) -> None:
    # A block of 0 and +-1 is stored exactly, and stays so when nothing is added.
    shape, options = LAYOUTS[layout]
    quantized = torch.randn(shape).requires_grad_()
    plain = quantized.detach().clone().requires_grad_()
    gradient = torch.randint(-1, 2, shape).float()
    results = []
    for p, kind in ((quantized, format_name), (plain, None)):
        opt = libmuon.Muon(
            [p], state_dtype=kind, momentum_form="heavy_ball", momentum=1.0, **options
        )
        for factor in (1, 0, 0):
            p.grad = gradient * factor
            opt.step()
        results.append(state_of(plain_state(opt)))
    assert torch.equal(*results)
    assert torch.equal(results[0], gradient)
    assert torch.equal(quantized, plain)


@pytest.mark.parametrize("algorithm", ["muon", "normuon", "adamw", "adam"])
@pytest.mark.parametrize("format_name", [*FORMATS, None, "float32", "bfloat16"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.filterwarnings("ignore:bfloat16 parameters are rounded")
def test_e3_three_steps_save_load_and_three_more_are_six(
    algorithm: str, format_name: str | None, dtype: torch.dtype
) -> None:
    shapes = [(7, 130), (64, 9), (5, 3)] + ([(33,), ()] if algorithm.startswith("adam") else [])
    straight = [make(*shape, dtype=dtype) for shape in shapes]
    resumed = [p.detach().clone().requires_grad_() for p in straight]
    gradients = [[torch.randn(s).to(dtype) for s in shapes] for _ in range(6)]

    def optimizer(params: list[Tensor]) -> libmuon.Muon:
        return libmuon.Muon([group(algorithm, params)], state_dtype=format_name)

    def train(opt: libmuon.Muon, params: list[Tensor], steps: list[list[Tensor]]) -> None:
        for step in steps:
            for p, gradient in zip(params, step, strict=True):
                p.grad = gradient.clone()
            opt.step()

    whole = optimizer(straight)
    train(whole, straight, gradients)
    first = optimizer(resumed)
    train(first, resumed, gradients[:3])
    file = io.BytesIO()
    torch.save(first.state_dict(), file)
    file.seek(0)
    second = optimizer(resumed)
    second.load_state_dict(torch.load(file, weights_only=True))
    train(second, resumed, gradients[3:])
    for a, b in zip(straight, resumed, strict=True):
        assert torch.equal(a, b)
        assert whole.state[a].keys() == second.state[b].keys()
        for key, value in whole.state[a].items():
            other = second.state[b][key]
            assert value.dtype == other.dtype
            assert torch.equal(bits(value), bits(other))


def bits(tensor: Tensor) -> Tensor:
    return tensor.view(torch.uint8) if tensor.dtype == torch.float8_e4m3fn else tensor


@pytest.mark.parametrize(
    ("format_name", "shape", "options", "limit"),
    [
        ("int8", (1024, 1024), {}, 1.05),
        ("fp8", (1024, 1024), {}, 1.05),
        ("int4", (1024, 1024), {}, 0.55),
        ("int4", (64, 64, 3, 3), {"flatten": True}, 0.55),
        ("int8", (64, 64, 3, 3), {"flatten": True}, 1.05),
    ],
)
def test_bytes_of_a_parameter(
    format_name: str, shape: tuple[int, ...], options: dict[str, Any], limit: float
) -> None:
    p = make(*shape)
    opt = libmuon.Muon([p], state_dtype=format_name, **options)
    opt.step()
    stored = sum(t.numel() * t.element_size() for t in opt.state[p].values())
    assert stored <= limit * p.numel()


@pytest.mark.parametrize("format_name", FORMATS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64, torch.complex128])
def test_wide_and_complex_parameters_take_codes(format_name: str, dtype: torch.dtype) -> None:
    ours = torch.randn(6, 70, dtype=dtype).requires_grad_()
    theirs = ours.detach().clone().requires_grad_()
    ours.grad = torch.randn(6, 70, dtype=dtype)
    theirs.grad = ours.grad.clone()
    opt = libmuon.Muon([ours], state_dtype=format_name, nesterov=False)
    other = libmuon.Muon([theirs], nesterov=False)
    opt.step()
    other.step()
    # The first step's matrix is what plain state gives: it is rounded afterwards.
    assert torch.equal(ours, theirs)
    codes = state_of(opt)
    width = 140 if dtype.is_complex else 70
    assert codes.numel() == 6 * (width // 2 if format_name == "int4" else width)


@pytest.mark.parametrize("format_name", FORMATS)
def test_scales_follow_huge_and_tiny_gradients(format_name: str) -> None:
    for scale in (1e-30, 1e30):
        p = make(4, 200)
        p.grad.mul_(scale)  # type: ignore[union-attr]
        expected = p.grad / 4  # type: ignore[operator]
        opt = libmuon.Muon([p], state_dtype=format_name, momentum=0.75)
        opt.step()
        error = (state_of(plain_state(opt)) - expected).abs().max()
        assert error <= (HALF_GAP[format_name] + ROUNDING) * expected.abs().max()


@pytest.mark.parametrize("format_name", FORMATS)
def test_a_nan_stays_in_its_matrix(format_name: str) -> None:
    sick, healthy, twin = make(4, 200), make(4, 200), make(4, 200)
    twin.data.copy_(healthy.data)
    twin.grad.copy_(healthy.grad)  # type: ignore[union-attr, arg-type]
    sick.grad[1, 3] = torch.nan  # type: ignore[index]
    libmuon.Muon([sick, healthy], state_dtype=format_name).step()
    libmuon.Muon([twin], state_dtype=format_name).step()
    assert sick.isnan().all()
    assert torch.equal(healthy, twin)


@pytest.mark.parametrize("format_name", FORMATS)
def test_a_skipped_matrix_keeps_its_codes(format_name: str) -> None:
    p = make(3, 4, 130)
    opt = libmuon.Muon([p], state_dtype=format_name, batch_dims=1, nonfinite="skip")
    opt.step()
    before = {key: bits(value).clone() for key, value in opt.state[p].items()}
    weight = p.detach().clone()
    p.grad[1, 0, 0] = torch.inf  # type: ignore[index]
    opt.step()
    assert torch.equal(p[1], weight[1])
    assert not torch.equal(p[0], weight[0])
    for key, value in opt.state[p].items():
        assert torch.equal(bits(value)[1], before[key][1])


@pytest.mark.parametrize("format_name", FORMATS)
def test_batches_do_not_change_the_bits(format_name: str) -> None:
    results = []
    for batch_size in (None, 1, 2):
        torch.manual_seed(1)
        params = [make(4, 9, 130), make(9, 130)]
        opt = libmuon.Muon(
            [
                group("muon", params[:1], batch_dims=1, batch_size=batch_size),
                group("muon", params[1:], batch_size=batch_size),
            ],
            state_dtype=format_name,
        )
        for _ in range(3):
            opt.step()
        results.append(params)
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize("format_name", FORMATS)
@pytest.mark.parametrize("amsgrad", [False, True])
def test_a_second_moment_never_becomes_zero(format_name: str, amsgrad: bool) -> None:
    # One entry has a gradient once, its neighbours have large ones: were its exp_avg_sq rounded to
    # zero, the update would be exp_avg / eps.
    p = torch.zeros(1, BLOCK).requires_grad_()
    opt = libmuon.Muon([group("adamw", [p], amsgrad=amsgrad)], state_dtype=format_name)
    for step in range(20):
        p.grad = torch.full((1, BLOCK), 100.0)
        p.grad[0, 5] = 1e-4 if step == 0 else 0.0
        opt.step()
    assert p[0, 5].abs() <= p[0, 4].abs()


def test_changing_the_format_keeps_the_momentum() -> None:
    p = make(8, 200)
    opt = libmuon.Muon([p], state_dtype="float32")
    opt.step()
    before = state_of(opt).clone()
    for choice in ("int8", "fp8", "int4", "bfloat16", "float32"):
        opt.param_groups[0]["state_dtype"] = choice
        opt.state_dict()
    error = (state_of(opt) - before).abs().max()
    assert 0 < error <= sum(HALF_GAP.values()) * before.abs().max()


@pytest.mark.parametrize("saved", [*FORMATS, None])
@pytest.mark.parametrize("loaded", [*FORMATS, None])
@pytest.mark.parametrize("algorithm", ["normuon", "adamw"])
def test_e6_state_loads_into_another_format(
    saved: str | None, loaded: str | None, algorithm: str
) -> None:
    p = make(8, 200)
    opt = libmuon.Muon([group(algorithm, [p])], state_dtype=saved)
    for _ in range(2):
        opt.step()
    q = p.detach().clone().requires_grad_()
    other = libmuon.Muon([group(algorithm, [q])], state_dtype=loaded)
    other.load_state_dict(opt.state_dict())
    assert other.param_groups[0]["state_dtype"] == loaded
    key = "exp_avg" if algorithm == "adamw" else "momentum_buffer"
    exact, got = (state_of(plain_state(o), key) for o in (opt, other))
    limit = 0.0 if saved == loaded or loaded is None else HALF_GAP[loaded] + ROUNDING
    assert (exact - got).abs().max() <= limit * exact.abs().max()


@pytest.mark.parametrize(
    ("damage", "text"),
    [
        (
            lambda s: s.pop("momentum_buffer_scale"),
            "int8 codes as momentum_buffer .*but no momentum_buffer_scale",
        ),
        (
            lambda s: s.update(momentum_buffer=s["momentum_buffer"][:, :9]),
            r"shape \(8, 9\)|\[8, 9\]",
        ),
        (
            lambda s: s.update(momentum_buffer_scale=torch.ones(8, 3)),
            r"momentum_buffer_scale of shape \(8, 3\)",
        ),
        (lambda s: s.update(momentum_buffer=torch.ones(8, 200).long()), "int64|Long"),
        (lambda s: s.update(momentum_buffer_scale="1"), "a str as momentum_buffer_scale"),
    ],
)
def test_state_that_does_not_fit_is_refused(damage: Any, text: str) -> None:
    p = make(8, 200)
    opt = libmuon.Muon([p], state_dtype="int8")
    opt.step()
    wrong = opt.state_dict()
    wrong["state"] = {0: dict(wrong["state"][0])}
    damage(wrong["state"][0])
    before = {key: value.clone() for key, value in opt.state[p].items()}
    with pytest.raises(ValueError, match=text):
        opt.load_state_dict(wrong)
    for key, value in opt.state[p].items():
        assert torch.equal(value, before[key])


@pytest.mark.parametrize("format_name", FORMATS)
@pytest.mark.parametrize("whole", ["stages", "matrix_update", "update"])
def test_algorithms_of_ones_own_see_numbers(format_name: str, whole: str) -> None:
    seen = []

    class Seen(libmuon.Algorithm):
        name = f"seen-{format_name}-{whole}"
        state = {"momentum_buffer": "param", "second": "param"}

        def refine(self, matrices, state, groups):  # type: ignore[no-untyped-def]
            for u, slots in zip(matrices, state, strict=True):
                seen.append(slots["second"].clone())
                slots["second"].fill_(2.0)
                u.mul_(slots["second"])

    def update(self, params, grads, state, groups, *factors):  # type: ignore[no-untyped-def]
        for p, slots in zip(params, state, strict=True):
            seen.append(slots["second"].clone())
            slots["second"].fill_(2.0)
            p.add_(slots["second"])

    if whole != "stages":
        setattr(Seen, whole, update)
    libmuon.register_algorithm(Seen)
    p = make(4, 150)
    opt = libmuon.Muon([group(Seen.name, [p])], state_dtype=format_name)
    for _ in range(2):
        opt.step()
    assert [s.dtype for s in seen] == [torch.float32] * 2
    assert (seen[0] == 0).all()
    assert (seen[1] == 2).all()
    assert opt.state[p]["second"].dtype not in (torch.float32, torch.float64)


@pytest.mark.parametrize("format_name", FORMATS)
@pytest.mark.parametrize("master", [None, "split"])
def test_a_long_vector_is_cut_without_a_trace(format_name: str, master: str | None) -> None:
    # More than two slices of 2^19 values; the pieces are whole blocks.
    dtype = torch.bfloat16 if master else torch.float32
    whole = make(1_200_000, dtype=dtype)
    pieces = [p.clone().requires_grad_() for p in whole.detach().split(BLOCK * 1000)]
    gradients = whole.grad.split(BLOCK * 1000)  # type: ignore[union-attr]
    options = {"state_dtype": format_name, "master": master, "algorithm": "adamw"}
    opts = [libmuon.Muon([whole], **options), libmuon.Muon(pieces, **options)]
    for piece, gradient in zip(pieces, gradients, strict=True):
        piece.grad = gradient.clone()
    for _ in range(2):
        for opt in opts:
            opt.step()
    assert torch.equal(whole, torch.cat(pieces))
    for key in ("exp_avg", "exp_avg_scale", "exp_avg_sq", "exp_avg_sq_scale"):
        parts = torch.cat([bits(opts[1].state[p][key]) for p in pieces])
        assert torch.equal(bits(opts[0].state[whole][key]), parts)
