"""How a parameter is matrices, seen through whole steps of `libmuon.Muon`."""

import libmuon
import pytest
import torch
from reference import exact_orthogonalize, relative_error

TRIPLE = (3.4445, -4.775, 2.0315)
SCHEDULE = [TRIPLE] * 5


def parameter(*shape, dtype=torch.float64):
    return torch.nn.Parameter(torch.randn(shape, dtype=dtype))


def step(params, grads, steps=1, **options):
    """`steps` steps of a fresh optimizer with the same gradients; returns the optimizer."""
    params = [params] if isinstance(params, torch.Tensor) else params
    grads = [grads] if isinstance(grads, torch.Tensor) else grads
    optimizer = libmuon.Muon(params, **{"lr": 0.1} | options)
    for _ in range(steps):
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad
        optimizer.step()
    return optimizer


def expected_step(param, grad, factor, lr=0.1, weight_decay=0.1):
    """The first step of a 2D parameter, by the definition."""
    update = exact_orthogonalize(0.05 * grad * 1.95, SCHEDULE)
    return param * (1 - lr * weight_decay) - lr * factor * update


def assert_close(got, expected, bound=1e-11):
    assert got.shape == expected.shape
    assert relative_error(got.detach(), expected.detach()) <= bound


@pytest.mark.parametrize("nonfinite", ["propagate", "skip"])
def test_b1_b7_b8_a_convolution_is_flattened_and_keeps_its_shape(nonfinite):
    param, grad = parameter(16, 8, 3, 3), torch.randn(16, 8, 3, 3, dtype=torch.float64)
    expected = expected_step(param.detach().reshape(16, 72), grad.reshape(16, 72), factor=1.0)
    optimizer = step(param, grad, flatten=True, nonfinite=nonfinite)
    assert_close(param, expected.reshape(16, 8, 3, 3))
    assert optimizer.state[param]["momentum_buffer"].shape == param.shape


def test_b3_one_object_trains_kernels_matrices_and_biases():
    model = torch.nn.Sequential(
        torch.nn.Conv2d(3, 8, 3), torch.nn.Flatten(), torch.nn.Linear(8 * 36, 4)
    )
    kernel, kernel_bias, weight, bias = model.parameters()
    optimizer = libmuon.Muon(
        [
            {"params": [weight]},
            {"params": [kernel], "flatten": True},
            {"params": [kernel_bias, bias], "algorithm": "adamw", "lr": 3e-3},
        ],
        lr=0.02,
    )
    x, target = torch.randn(32, 3, 8, 8), torch.randint(4, (32,))
    losses = []
    for _ in range(60):
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(x), target)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.3 * losses[0]


@pytest.mark.parametrize("algorithm", ["muon", "normuon"])
def test_b4_rows_and_columns_by_their_dims(algorithm):
    """[a, b, c, d] with rows (c, a), columns d and b a batch, against the permuted copy."""
    param, grad = parameter(2, 3, 5, 4), torch.randn(2, 3, 5, 4, dtype=torch.float64)
    order = (1, 2, 0, 3)
    copy = torch.nn.Parameter(param.detach().permute(order).reshape(3, 10, 4).clone())
    step(param, grad, steps=2, algorithm=algorithm, rows=(2, 0), cols=(3,))
    permuted = grad.permute(order).reshape(3, 10, 4)
    step(copy, permuted, steps=2, algorithm=algorithm, batch_dims=1)
    assert_close(param.permute(order).reshape(3, 10, 4), copy, bound=1e-13)


@pytest.mark.parametrize(
    ("scale", "factor"),
    [
        (None, 16 / 3),
        ("original", 16 / 3),
        ("match_rms_adamw", 3.2),
        ("spectral_unclamped", 16 / 3),
    ],
)
def test_b6_the_factor_of_a_depthwise_kernel_is_that_of_its_flattened_matrix(scale, factor):
    param = parameter(256, 1, 3, 3)
    grad = torch.randn_like(param)
    expected = expected_step(param.detach().reshape(256, 9), grad.reshape(256, 9), factor)
    step(param, grad, flatten=True, adjust_lr_fn=scale)
    assert_close(param, expected.reshape(256, 1, 3, 3))


def test_b12_flatten_and_batch_in_two_groups_of_one_optimizer():
    kernel, experts = parameter(6, 4, 5), parameter(3, 8, 4)
    grads = [torch.randn_like(kernel), torch.randn_like(experts)]
    expected_kernel = expected_step(kernel.detach().reshape(6, 20), grads[0].reshape(6, 20), 1.0)
    expected_experts = torch.stack(
        [expected_step(p, g, 2**0.5) for p, g in zip(experts.detach(), grads[1], strict=True)]
    )
    optimizer = libmuon.Muon(
        [{"params": [kernel], "flatten": True}, {"params": [experts], "batch_dims": 1}], lr=0.1
    )
    kernel.grad, experts.grad = grads
    optimizer.step()
    assert_close(kernel, expected_kernel.reshape(kernel.shape))
    assert_close(experts, expected_experts)


@pytest.mark.parametrize("algorithm", ["muon", "normuon"])
@pytest.mark.parametrize("schedule", libmuon.schedules())
def test_b13_b15_stacked_experts_equal_separate_parameters(algorithm, schedule):
    stack, grads = parameter(2, 3, 5, 4), torch.randn(2, 3, 5, 4, dtype=torch.float64)
    options = {"algorithm": algorithm, "ns_coefficients": schedule, "steps": 3}
    alone = [torch.nn.Parameter(p.clone()) for p in stack.detach().view(6, 5, 4)]
    step(stack, grads, batch_dims=2, **options)
    step(alone, list(grads.view(6, 5, 4)), **options)
    assert torch.equal(stack.detach().view(6, 5, 4), torch.stack([p.detach() for p in alone]))


@pytest.mark.parametrize("algorithm", ["muon", "normuon"])
@pytest.mark.parametrize("split_dim", [0, 1])
@pytest.mark.parametrize("sizes", [[2048, 2048, 256, 256], [6, 2], [3, 3, 1]], ids=str)
def test_b16_b17_unequal_blocks_equal_separate_parameters(algorithm, split_dim, sizes):
    sizes = [size // 64 if size > 64 else size for size in sizes]
    shape = (sum(sizes), 10) if split_dim == 0 else (10, sum(sizes))
    whole, grad = parameter(*shape), torch.randn(shape, dtype=torch.float64)
    blocks = [torch.nn.Parameter(p.clone()) for p in whole.detach().split(sizes, split_dim)]
    grads = [g.contiguous() for g in grad.split(sizes, split_dim)]
    step(whole, grad, steps=3, algorithm=algorithm, split_sizes=sizes, split_dim=split_dim)
    step(blocks, grads, steps=3, algorithm=algorithm)
    assert_close(whole, torch.cat([b.detach() for b in blocks], split_dim), bound=1e-13)


def test_b18_heads_are_equal_blocks():
    by_heads = parameter(12, 7)
    by_sizes = torch.nn.Parameter(by_heads.detach().clone())
    grad = torch.randn_like(by_heads)
    step(by_heads, grad, num_heads=3)
    step(by_sizes, grad, split_sizes=[4, 4, 4])
    assert torch.equal(by_heads.detach(), by_sizes.detach())


@pytest.mark.parametrize("heads", [0, -1, 5, 2.0, "4", True])
def test_b18_wrong_numbers_of_heads_are_refused(heads):
    with pytest.raises((ValueError, TypeError), match="num_heads"):
        libmuon.Muon([parameter(12, 7)], num_heads=heads)


@pytest.mark.parametrize(
    "sizes", [[6, 5], [12], [13, -1], [12, 0], [6.0, 6.0], [True, 11], "66", 12], ids=str
)
def test_b16_b18_wrong_split_sizes_are_refused(sizes):
    with pytest.raises((ValueError, TypeError), match="split_sizes"):
        libmuon.Muon([parameter(12, 7)], split_sizes=sizes)


@pytest.mark.parametrize("scale", ["original", "match_rms_adamw", "spectral_unclamped"])
def test_b20_transposed_storage_gives_the_transposed_step_only_when_told_so(scale):
    weight, grad = parameter(4, 10), torch.randn(4, 10, dtype=torch.float64)
    told = torch.nn.Parameter(weight.detach().mT.clone())
    silent = torch.nn.Parameter(weight.detach().mT.clone())
    stored_grad = grad.mT.contiguous()
    step(weight, grad, adjust_lr_fn=scale)
    step(told, stored_grad, adjust_lr_fn=scale, rows=1, cols=0)
    step(silent, stored_grad, adjust_lr_fn=scale)
    assert_close(told.mT, weight)
    is_symmetric = scale == "match_rms_adamw"
    assert (relative_error(silent.detach().mT, weight.detach()) <= 1e-11) == is_symmetric


@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (0, 0)])
@pytest.mark.parametrize("algorithm", ["muon", "normuon"])
def test_b22_parameters_without_entries_step_beside_others(shape, algorithm):
    empty, other = parameter(*shape), parameter(6, 4)
    twin = torch.nn.Parameter(other.detach().clone())
    grad = torch.randn_like(other)
    step([empty, other], [torch.empty(shape, dtype=torch.float64), grad], algorithm=algorithm)
    step(twin, grad, algorithm=algorithm)
    assert empty.shape == shape
    assert torch.equal(other.detach(), twin.detach())


GRADIENTS = {
    "transposed": lambda g: g.mT.contiguous().mT,
    "row_steps": lambda g: torch.stack([g, g + 1], 1).flatten(0, 1)[::2],
    "column_steps": lambda g: torch.stack([g, g + 1], -1).flatten(-2)[..., ::2],
    "offset": lambda g: torch.cat([torch.ones(3, dtype=g.dtype), g.flatten()])[3:].view(g.shape),
}


@pytest.mark.parametrize("layout", GRADIENTS.values(), ids=GRADIENTS.keys())
@pytest.mark.parametrize("algorithm", ["muon", "normuon", "adamw"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_strides_of_gradients_and_parameters_do_not_matter(layout, algorithm, dtype):
    start, grad = torch.randn(12, 20, dtype=dtype), torch.randn(12, 20, dtype=dtype)
    results = []
    for param, strided in ((start, grad), (start, layout(grad)), (layout(start), grad)):
        leaf = torch.nn.Parameter(param.clone(memory_format=torch.preserve_format))
        step(leaf, strided, steps=2, algorithm=algorithm)
        results.append(leaf.detach())
    # torch's fused Adam rounds otherwise in the remainders of its vector loops
    rtol = 4 * torch.finfo(dtype).eps if algorithm == "adamw" else 0
    torch.testing.assert_close(results[1], results[0], rtol=rtol, atol=rtol)
    torch.testing.assert_close(results[2], results[0], rtol=rtol, atol=rtol)


@pytest.mark.parametrize("algorithm", ["muon", "normuon", "adamw"])
def test_an_expanded_gradient_is_its_full_tensor(algorithm):
    """sum().backward() leaves gradients of stride 0."""
    start = torch.randn(6, 9)
    for grad in (torch.tensor(2.0).expand(6, 9), torch.randn(9).expand(6, 9)):
        strided, full = (torch.nn.Parameter(start.clone()) for _ in range(2))
        step(strided, grad, algorithm=algorithm)
        step(full, grad.contiguous(), algorithm=algorithm)
        rtol = 4 * torch.finfo(torch.float32).eps if algorithm == "adamw" else 0
        torch.testing.assert_close(strided, full, rtol=rtol, atol=rtol)


@pytest.mark.parametrize("options", [{"flatten": True}, {"batch_dims": 2}, {"rows": 1}], ids=str)
@pytest.mark.parametrize("algorithm", ["muon", "normuon"])
def test_channels_last_parameters_and_gradients(options, algorithm):
    start, grad = torch.randn(8, 4, 3, 5), torch.randn(8, 4, 3, 5)
    results = []
    for memory_format in (torch.contiguous_format, torch.channels_last):
        param = torch.nn.Parameter(start.clone(memory_format=memory_format))
        strided = grad.to(memory_format=memory_format)
        optimizer = step(param, strided, steps=2, algorithm=algorithm, **options)
        buffer = optimizer.state[param]["momentum_buffer"]
        assert buffer.stride() == param.stride()
        results.append((param.detach(), buffer))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])


@pytest.mark.parametrize("algorithm", ["muon", "normuon"])
def test_a9_complex_parameters_and_their_real_pairs(algorithm):
    weight = torch.nn.Parameter(torch.randn(5, 8, dtype=torch.complex128))
    grad = torch.randn_like(weight)
    pairs = torch.nn.Parameter(torch.view_as_real(weight.detach().clone()).clone())
    start = weight.detach().clone()
    step(weight, grad, algorithm=algorithm)
    step(pairs, torch.view_as_real(grad).clone(), algorithm=algorithm, complex_dim=-1)
    assert_close(torch.view_as_complex(pairs.detach()), weight)
    if algorithm == "muon":
        assert_close(weight, expected_step(start, grad, factor=1.0))


@pytest.mark.parametrize("algorithm", ["muon", "normuon"])
def test_a1_a_zero_gradient_moves_nothing_but_the_decay(algorithm):
    for shape, options in (((4, 6), {}), ((3, 4, 6), {"batch_dims": 1})):
        param = parameter(*shape)
        start, grad = param.detach().clone(), torch.randn(shape, dtype=torch.float64)
        grad[0] = 0
        if len(shape) == 2:
            grad.zero_()
        step(param, grad, algorithm=algorithm, **options)
        assert param.isfinite().all()
        still = param.detach() if len(shape) == 2 else param.detach()[0]
        before = start if len(shape) == 2 else start[0]
        torch.testing.assert_close(still, before * (1 - 0.1 * 0.1), rtol=1e-15, atol=0)


def test_d4_normuon_keeps_the_frobenius_norm_then_takes_the_shape_factor():
    grad = torch.randn(12, 5, dtype=torch.float64)
    moved = {}
    for algorithm in ("muon", "normuon"):
        param = torch.nn.Parameter(torch.zeros_like(grad))
        step(param, grad, algorithm=algorithm, weight_decay=0.0)
        moved[algorithm] = param.detach()
    norms = [torch.linalg.matrix_norm(m).item() for m in moved.values()]
    assert abs(norms[0] - norms[1]) <= 1e-12 * norms[0]
    rows = moved["normuon"].square().mean(1)
    torch.testing.assert_close(rows, rows.mean().expand(12), rtol=1e-6, atol=0)
    assert relative_error(moved["normuon"], moved["muon"]) > 1e-2


@pytest.mark.parametrize("shape", [(128, 128), (256, 64), (64, 256), (96, 100)])
def test_d5_match_rms_adamw_steps_by_0_2_lr(shape):
    """For a full-rank matrix; the schedule's band is the uncertainty."""
    param = torch.nn.Parameter(torch.zeros(shape))
    step(param, torch.randn(shape), lr=1.0, weight_decay=0.0, adjust_lr_fn="match_rms_adamw")
    rms = param.detach().square().mean().sqrt().item()
    assert 0.2 * 0.68 <= rms <= 0.2 * 1.14


def test_d6_lr_multiplier_scales_the_update_and_not_the_decay():
    start, grad = torch.randn(6, 4, dtype=torch.float64), torch.randn(6, 4, dtype=torch.float64)
    results = {}
    for multiplier in (None, 1.0, 0.25):
        param = torch.nn.Parameter(start.clone())
        options = {} if multiplier is None else {"lr_multiplier": multiplier}
        step(param, grad, **options)
        results[multiplier] = param.detach()
    assert torch.equal(results[None], results[1.0])
    decayed = start * (1 - 0.1 * 0.1)
    moved = results[0.25] - decayed
    torch.testing.assert_close(moved, 0.25 * (results[1.0] - decayed), rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("name", ["spectral", "spectral_norm", "rms_norm", "Original", ""])
def test_d3_ambiguous_names_of_the_factor_are_refused(name):
    with pytest.raises(ValueError, match="[Aa]djust"):
        libmuon.Muon([parameter(4, 4)], adjust_lr_fn=name)
