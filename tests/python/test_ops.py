"""Every op of libmuon: its schema tells the truth, and compilers may rely on it."""

import tempfile
from pathlib import Path

import libmuon
import pytest
import torch
from torch.library import opcheck

OPS = torch.ops.muon
FILE = str(Path(tempfile.mkdtemp()) / "file.safetensors")
SPEC = "algorithm=muon"
ALL = {
    name.removeprefix("muon::").split(".")[0]
    for name in torch._C._dispatch_get_all_op_names()
    if name.startswith("muon::")
}


def hyper():
    """One group: the columns of `muon::Hyper`."""
    row = [0.1, 0.1, 0.95, 1e-7, 1.0, 0.9, 0.95, 0.95, 1.0, 0.0, 0.0, 0.0, 0.0]
    return torch.tensor([row], dtype=torch.float64)


def matrices(*shape):
    return [torch.randn(shape or (4, 6)), torch.randn(shape or (4, 6))]


def adam_state():
    return [
        state
        for _ in range(2)
        for state in (torch.zeros(4, 6), torch.zeros(4, 6), torch.tensor(0.0))
    ]


@pytest.fixture
def plan():
    handle = OPS.create_plan(matrices(), [0, 0], [SPEC], ["a", "b"])
    yield handle
    OPS.free_plan(handle)


def calls(plan):
    """(op, arguments, keyword arguments), every op at least once."""
    params, grads, momenta, work = matrices(), matrices(), matrices(), matrices()
    adam = "algorithm=adamw"
    optional = {"grad_scale": torch.tensor([4.0]), "found_inf": torch.tensor([0.0])}
    skipped = torch.zeros(2, dtype=torch.int64)
    return [
        ("version", (), {}),
        ("build_info", (), {}),
        ("orthogonalize", (params[0], SPEC, 1e-7), {}),
        ("orthogonalize", (params[0].mT, "algorithm=muon;steps=3", 0.0), {}),
        ("orthogonalize", (torch.randn(2, 3, 4, dtype=torch.complex64), SPEC, 1e-7), {}),
        ("gram", (torch.randn(2, 4, 6),), {}),
        ("qk_clip_", (*matrices(), torch.tensor([400.0, 1.0]), 100.0, 0, 0.5, 0), {}),
        ("qk_clip_", (*matrices(), torch.randn(1, 2, 3, 3), 1.0, 1, 0.5, 1), {}),
        ("step_", (plan, params, grads, momenta, hyper()), {}),
        ("step_", (plan, params, [grads[0], None], momenta, hyper()), {}),
        ("step_", (plan, params, grads, momenta, hyper()), {**optional, "skipped": skipped}),
        ("muon_", (params, grads, momenta, hyper(), SPEC), {}),
        ("muon_", (params, [None, grads[1]], momenta, hyper(), SPEC), {}),
        ("create_plan", (params, [0, 0], [SPEC], ["a", "b"]), {}),
        ("free_plan", (-1,), {}),
        ("explain_plan", (plan,), {}),
        ("workspace_bytes", (plan,), {}),
        ("write_state_file", (FILE, ["a"], [torch.ones(2)], {"format": "test"}), {}),
        ("read_state_file", (FILE, True), {}),
        ("state_layout", ("algorithm=normuon", [4, 6], torch.float32, "a"), {}),
        ("encode_state", (torch.randn(4, 6), SPEC + ";state_format=int4", "a"), {}),
        (
            "decode_state",
            (torch.zeros(4, 6).char(), torch.ones(4, 1), SPEC, [4, 6], False, "a"),
            {},
        ),
        ("matrix_shapes", (SPEC + ";flatten=1", [4, 6, 2], "a"), {}),
        ("shape_factors", (SPEC, [4, 6], "a"), {}),
        ("schedule_names", (), {}),
        ("schedule_coefficients", ("schedule=you",), {}),
        ("registered_algorithms", (), {}),
        ("is_elementwise", ("adamw",), {}),
        ("algorithm_options", ("muon",), {}),
        ("register_algorithm", ("test-op", ["b param"], [], ["o"], [1.0]), {"replace": False}),
        ("accumulate_", (grads, momenta, work, hyper(), [0, 0], None), {}),
        ("orthogonalize_", (torch.randn(2, 4, 6), hyper(), [0, 0], SPEC), {}),
        ("normuon_", ([torch.randn(2, 4, 6)], [torch.zeros(2, 4, 1)], hyper(), [0]), {}),
        ("apply_", (params, work, hyper(), [0, 0], [1.0, 1.0]), {}),
        ("adam_", (params, grads, adam_state(), hyper(), [0, 0], None, adam), {}),
    ]


def test_every_op_is_called_here():
    assert {name for name, _, _ in calls(0)} == ALL


@pytest.mark.parametrize("index", range(len(calls(0))), ids=lambda i: f"{i}-{calls(0)[i][0]}")
def test_opcheck(index, plan):
    name, args, kwargs = calls(plan)[index]
    if any(isinstance(a, torch.Tensor | list) and a is not kwargs for a in args) and name in TENSOR:
        opcheck(getattr(OPS, name).default, args, kwargs)
    else:
        assert getattr(OPS, name)(*args, **kwargs) is not NotImplemented


TENSOR = {
    "orthogonalize",
    "step_",
    "muon_",
    "accumulate_",
    "orthogonalize_",
    "normuon_",
    "apply_",
    "adam_",
}


def test_plans_live_by_their_handle():
    handle = OPS.create_plan(matrices(), [0, 0], [SPEC], ["a", "b"])
    assert "a" in OPS.explain_plan(handle)
    OPS.free_plan(handle)
    OPS.free_plan(handle)  # unknown handles are ignored
    params, grads, momenta = matrices(), matrices(), matrices()
    with pytest.raises((ValueError, RuntimeError), match="plan"):
        OPS.step_(handle, params, grads, momenta, hyper())


def test_step_equals_the_functional_core():
    handle = OPS.create_plan(matrices(), [0, 0], [SPEC], ["a", "b"])
    params, grads, momenta = matrices(), matrices(), matrices()
    copies = [[t.clone() for t in tensors] for tensors in (params, momenta)]
    OPS.step_(handle, params, grads, momenta, hyper())
    OPS.muon_(copies[0], grads, copies[1], hyper(), SPEC)
    OPS.free_plan(handle)
    for mine, other in zip([*params, *momenta], [*copies[0], *copies[1]], strict=True):
        assert torch.equal(mine, other)


def test_meta_tensors_have_the_shape_and_strides_of_the_result():
    for x in (torch.randn(4, 6), torch.randn(6, 4).mT, torch.randn(3, 4, 6).permute(1, 0, 2)):
        real = libmuon.orthogonalize(x)
        meta = libmuon.orthogonalize(x.to("meta"))
        assert (meta.shape, meta.stride(), meta.dtype) == (real.shape, real.stride(), real.dtype)


@pytest.mark.slow
def test_orthogonalize_compiles_into_one_graph():
    compiled = torch.compile(lambda x: libmuon.orthogonalize(2 * x) + 1, fullgraph=True)
    x = torch.randn(5, 8)
    torch.testing.assert_close(compiled(x), libmuon.orthogonalize(2 * x) + 1)
