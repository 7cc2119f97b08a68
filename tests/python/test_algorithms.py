"""Algorithms written in Python: stages, whole updates, options, state, checkpoints, errors."""

from __future__ import annotations

import copy
import io
import itertools
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import libmuon
import pytest
import torch
from reference import exact_orthogonalize
from torch import Tensor

EXAMPLES = Path(__file__).resolve().parents[2] / "examples/python"
_numbers = itertools.count()


def fresh_name() -> str:
    """A name that no other test has registered."""
    return f"test-algorithm-{next(_numbers)}"


def make_params(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float64) -> list[Tensor]:
    params = []
    for shape in shapes:
        p = torch.randn(shape, dtype=dtype).requires_grad_()
        p.grad = torch.randn(shape, dtype=dtype)
        params.append(p)
    return params


def clone(params: list[Tensor]) -> list[Tensor]:
    copies = [p.detach().clone().requires_grad_() for p in params]
    for new, old in zip(copies, params, strict=True):
        new.grad = None if old.grad is None else old.grad.clone()
    return copies


def test_stages_that_are_not_overridden_are_muons() -> None:
    class Same(libmuon.Algorithm):
        name = fresh_name()

    libmuon.register_algorithm(Same)
    ours = make_params((6, 4), (4, 9), (6, 4))
    theirs = clone(ours)
    opts = [libmuon.Muon(ours, algorithm=Same.name), libmuon.Muon(theirs)]
    for _ in range(3):
        for opt in opts:
            opt.step()
    for a, b in zip(ours, theirs, strict=True):
        assert torch.equal(a, b)


def test_every_stage_may_be_written_in_python() -> None:
    class Plain(libmuon.Algorithm):
        name = fresh_name()
        options = {"power": 1}

        def accumulate(self, grads, momenta, matrices, groups, grad_scale):  # type: ignore[no-untyped-def]
            for g, b, q, o in zip(grads, momenta, matrices, groups, strict=True):
                b.mul_(o["momentum"]).add_(g)
                q.copy_(b)

        def orthogonalize(self, matrices, groups):  # type: ignore[no-untyped-def]
            matrices.sign_()

        def refine(self, matrices, state, groups):  # type: ignore[no-untyped-def]
            for m, o in zip(matrices, groups, strict=True):
                m.mul_(o["power"])

        def apply(self, params, matrices, groups, factors):  # type: ignore[no-untyped-def]
            for p, m, o, factor in zip(params, matrices, groups, factors, strict=True):
                p.sub_(o["lr"] * factor * m)

    libmuon.register_algorithm(Plain)
    (p,) = make_params((4, 3))
    before, grad = p.detach().clone(), p.grad
    opt = libmuon.Muon([{"params": [p], "power": 3}], lr=0.1, algorithm=Plain.name)
    opt.step()
    torch.testing.assert_close(
        p.detach(), before - 0.1 * (4 / 3) ** 0.5 * 3 * grad.sign(), rtol=1e-14, atol=1e-14
    )
    assert torch.equal(opt.state[p]["momentum_buffer"], grad)


def test_a_whole_update_of_matrices_sees_batches_of_equal_ones() -> None:
    seen = []

    class Whole(libmuon.Algorithm):
        name = fresh_name()
        state = {"momentum_buffer": "param", "rows": "row", "steps": "step"}

        def matrix_update(self, params, grads, state, groups, factors):  # type: ignore[no-untyped-def]
            seen.append([tuple(p.shape) for p in params])
            for p, g, slots, o in zip(params, grads, state, groups, strict=True):
                slots["rows"].copy_(g.square().mean(-1, keepdim=True))
                p.sub_(o["lr"] * g / slots["rows"].sqrt() / slots["steps"])

    libmuon.register_algorithm(Whole)
    params = make_params((4, 3), (2, 2), (4, 3))
    want = clone(params)
    opt = libmuon.Muon(params, lr=0.1, algorithm=Whole.name)
    for step in (1, 2):
        opt.step()
        for p in want:
            row = p.grad.square().mean(-1, keepdim=True).sqrt()
            p.data -= 0.1 * p.grad / row / step
    assert sorted(seen[:2]) == [[(1, 2, 2)], [(1, 4, 3), (1, 4, 3)]]
    for a, b in zip(params, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-14, atol=1e-14)
        assert opt.state[a]["steps"].item() == 2


def test_steps_are_counted_once_for_a_parameter_in_several_batches() -> None:
    class Counted(libmuon.Algorithm):
        name = fresh_name()
        state = {"momentum_buffer": "param", "steps": "step"}

    libmuon.register_algorithm(Counted)
    (p,) = make_params((6, 4))
    opt = libmuon.Muon([p], algorithm=Counted.name, split_sizes=(2, 4))
    opt.step()
    assert opt.state[p]["steps"].item() == 1
    p.grad = None
    opt.step()
    assert opt.state[p]["steps"].item() == 1


def test_an_elementwise_update_takes_parameters_of_any_shape() -> None:
    class Sign(libmuon.Algorithm):
        name = fresh_name()
        state: Mapping[str, str] = {}
        options = {"strength": 1.0, "negate": False}

        def update(self, params, grads, state, groups):  # type: ignore[no-untyped-def]
            for p, g, o in zip(params, grads, groups, strict=True):
                assert isinstance(o["negate"], bool)
                p.sub_((-1 if o["negate"] else 1) * o["lr"] * o["strength"] * g.sign())

    libmuon.register_algorithm(Sign)
    params = make_params((3,), (2, 2, 2), ())
    want = [p.detach() - 0.5 * 2.0 * p.grad.sign() for p in params]
    opt = libmuon.Muon(
        [{"params": params, "algorithm": Sign.name, "lr": 0.5, "strength": 2}], lr=1.0
    )
    opt.step()
    for p, w in zip(params, want, strict=True):
        torch.testing.assert_close(p.detach(), w)


def test_split_weights_and_transposed_ones_reach_the_stages_as_matrices() -> None:
    shapes = []

    class Seen(libmuon.Algorithm):
        name = fresh_name()
        state = {"momentum_buffer": "param", "second": "param"}

        def refine(self, matrices, state, groups):  # type: ignore[no-untyped-def]
            shapes.extend(
                (tuple(m.shape), tuple(s["second"].shape))
                for m, s in zip(matrices, state, strict=True)
            )

    libmuon.register_algorithm(Seen)
    a, b = make_params((6, 4), (5, 7))
    libmuon.Muon(
        [{"params": [a], "split_sizes": (2, 4)}, {"params": [b], "rows": 1}], algorithm=Seen.name
    ).step()
    assert sorted(shapes) == [((1, n, m),) * 2 for n, m in ((2, 4), (4, 4), (7, 5))]


def test_own_options_are_inherited_scheduled_and_saved() -> None:
    values = []

    class Scheduled(libmuon.Algorithm):
        name = fresh_name()
        options = {"alpha": 0.5, "count": 2}

        def refine(self, matrices, state, groups):  # type: ignore[no-untyped-def]
            values.append((groups[0]["alpha"], groups[0]["count"]))

    libmuon.register_algorithm(Scheduled)
    (p,) = make_params((4, 4))
    opt = libmuon.Muon([{"params": [p], "alpha": 0.25}], algorithm=Scheduled.name)
    opt.step()
    opt.param_groups[0]["alpha"] = 0.75
    opt.step()
    assert values == [(0.25, 2), (0.75, 2)]
    other = libmuon.Muon([p], algorithm=Scheduled.name)
    other.load_state_dict(opt.state_dict())
    assert other.param_groups[0]["alpha"] == 0.75
    opt.param_groups[0]["alpha"] = float("nan")
    with pytest.raises(ValueError, match="alpha should be finite but is: nan"):
        opt.step()


def test_save_and_load_resume_bitwise() -> None:
    class Resumed(libmuon.Algorithm):
        name = fresh_name()
        state = {"momentum_buffer": "param", "mean": "row"}

        def refine(self, matrices, state, groups):  # type: ignore[no-untyped-def]
            for m, s in zip(matrices, state, strict=True):
                s["mean"].lerp_(m.square().mean(-1, keepdim=True), 0.1)
                m.div_(s["mean"].sqrt() + 1e-3)

    libmuon.register_algorithm(Resumed)
    params = make_params((5, 3), (3, 8), dtype=torch.float32)
    opt = libmuon.Muon(params, algorithm=Resumed.name)
    for _ in range(3):
        opt.step()
    file = io.BytesIO()
    torch.save(opt.state_dict(), file)
    file.seek(0)
    resumed = clone(params)
    again = libmuon.Muon(resumed, algorithm=Resumed.name)
    again.load_state_dict(torch.load(file, weights_only=True))
    for _ in range(3):
        opt.step()
        again.step()
    for a, b in zip(params, resumed, strict=True):
        assert torch.equal(a, b)


def test_amp_scale_is_undone_before_a_whole_update() -> None:
    class Scaled(libmuon.Algorithm):
        name = fresh_name()
        state: Mapping[str, str] = {}

        def matrix_update(self, params, grads, state, groups, factors):  # type: ignore[no-untyped-def]
            for p, g in zip(params, grads, strict=True):
                p.sub_(g)

    libmuon.register_algorithm(Scaled)
    (p,) = make_params((2, 2))
    want, grad = p.detach() - p.grad, p.grad.clone() * 4
    p.grad = grad.clone()
    opt = libmuon.Muon([p], algorithm=Scaled.name)
    opt.grad_scale, opt.found_inf = torch.tensor(4.0), torch.tensor(0.0)  # type: ignore[attr-defined]
    opt.step()
    torch.testing.assert_close(p.detach(), want)
    assert torch.equal(p.grad, grad)


def test_registering_the_same_class_again_replaces_it() -> None:
    algorithm = fresh_name()

    def define(value: float) -> Any:
        class Cell(libmuon.Algorithm):
            name = algorithm
            state: Mapping[str, str] = {}
            options = {"value": value}

            def matrix_update(self, params, grads, state, groups, factors):  # type: ignore[no-untyped-def]
                for p, o in zip(params, groups, strict=True):
                    p.fill_(o["value"])

        return Cell

    for value in (1.0, 2.0):
        libmuon.register_algorithm(define(value))
        (p,) = make_params((2, 2))
        libmuon.Muon([p], algorithm=algorithm).step()
        assert torch.equal(p.detach(), torch.full_like(p, value))


def test_an_option_that_a_new_class_adds_has_its_default_in_older_groups() -> None:
    algorithm = fresh_name()
    seen = []

    def define(**options: float) -> None:
        class Grown(libmuon.Algorithm):
            name = algorithm

            def refine(self, matrices, state, groups):  # type: ignore[no-untyped-def]
                seen.append({key: groups[0][key] for key in self.options})

        Grown.options = options
        libmuon.register_algorithm(Grown)

    define(first=1.0)
    opt = libmuon.Muon(make_params((2, 2)), algorithm=algorithm)
    opt.step()
    define(first=1.0, second=2.0)
    opt.step()
    assert seen == [{"first": 1.0}, {"first": 1.0, "second": 2.0}]


def test_names_that_differ_in_a_sign_are_different_algorithms() -> None:
    base = fresh_name()
    factors = {f"{base}-x": 0.0, f"{base}_x": 2.0, f"{base}.x": 3.0, f"{base}_2d_x": 4.0}

    def define(algorithm: str, factor: float) -> None:
        class Scaled(libmuon.Algorithm):
            name = algorithm

            def refine(self, matrices, state, groups):  # type: ignore[no-untyped-def]
                for m in matrices:
                    m.mul_(factor)

        Scaled.__qualname__ = algorithm
        libmuon.register_algorithm(Scaled)

    for algorithm, factor in factors.items():
        define(algorithm, factor)
    (p,) = make_params((3, 3))
    plain = p.detach().clone().requires_grad_()
    plain.grad = p.grad
    libmuon.Muon([plain], lr=0.1, weight_decay=0.0).step()
    change = plain.detach() - p.detach()
    for algorithm, factor in factors.items():
        (q,) = clone([p])
        libmuon.Muon([q], lr=0.1, weight_decay=0.0, algorithm=algorithm).step()
        torch.testing.assert_close(q.detach() - p.detach(), factor * change)


def test_a_class_that_cannot_be_made_is_not_registered() -> None:
    class Broken(libmuon.Algorithm):
        name = fresh_name()

        def __init__(self) -> None:
            raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        libmuon.register_algorithm(Broken)
    assert Broken.name not in libmuon.registered_algorithms()


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda p, m, f: (p, m[:1], f), "lists of 3 tensors, one a piece, got 1 .apply"),
        (lambda p, m, f: (p, m, []), "a factor a piece, got 0 for 3 pieces"),
        (
            lambda p, m, f: (p, [x.mT for x in m], f),
            r"of shape \[1, 4, 3\] on cpu, got \[1, 3, 4\]",
        ),
        (lambda p, m, f: (p[:1], m, f), "one group a piece, got 3 for 1 pieces"),
    ],
)
def test_pieces_that_a_stage_has_lost_are_refused(change: Any, text: str) -> None:
    class Careless(libmuon.Algorithm):
        name = fresh_name()

        def apply(self, params, matrices, groups, factors):  # type: ignore[no-untyped-def]
            params, matrices, factors = change(params, matrices, factors)
            super().apply(params, matrices, groups, factors)

    libmuon.register_algorithm(Careless)
    params = make_params((4, 3), (4, 3), (4, 3))
    before = [p.detach().clone() for p in params]
    with pytest.raises(ValueError, match=text):
        libmuon.Muon(params, algorithm=Careless.name).step()
    for p, old in zip(params, before, strict=True):
        assert torch.equal(p.detach(), old)


def test_an_error_in_a_stage_reaches_the_caller() -> None:
    class Failing(libmuon.Algorithm):
        name = fresh_name()

        def orthogonalize(self, matrices, groups):  # type: ignore[no-untyped-def]
            raise ArithmeticError("of the user's own")

    libmuon.register_algorithm(Failing)
    with pytest.raises(ArithmeticError, match="of the user's own"):
        libmuon.Muon(make_params((2, 2)), algorithm=Failing.name).step()


def test_an_error_in_a_stage_says_where_it_was_raised() -> None:
    class Failing(libmuon.Algorithm):
        name = fresh_name()

        def refine(self, matrices, state, groups):  # type: ignore[no-untyped-def]
            raise ArithmeticError("of the user's own")

    libmuon.register_algorithm(Failing)
    with pytest.raises(ArithmeticError) as caught:
        libmuon.Muon(make_params((2, 3)), algorithm=Failing.name).step()
    if sys.version_info >= (3, 11):
        (note,) = caught.value.__notes__
        assert f"refine of algorithm '{Failing.name}'" in note
        assert "Failing) on tensors of shape (1, 2, 3)" in note


def _resize(tensor: Tensor) -> None:
    tensor.resize_(1, 50, 50)


def _replace(tensor: Tensor) -> None:
    tensor.data = torch.zeros_like(tensor)


def _transpose(tensor: Tensor) -> None:
    tensor.transpose_(-1, -2)


@pytest.mark.parametrize("damage", [_resize, _replace, _transpose])
@pytest.mark.parametrize("stage", ["accumulate", "orthogonalize", "refine", "apply"])
def test_a_stage_that_moves_its_tensors_is_stopped(damage: Any, stage: str) -> None:
    def run(self, *args):  # type: ignore[no-untyped-def]
        target = args[1] if stage == "accumulate" else args[0]
        damage(target if isinstance(target, Tensor) else target[0])

    moved = type("Moved", (libmuon.Algorithm,), {"name": fresh_name(), stage: run})
    libmuon.register_algorithm(moved)
    (p,) = make_params((4, 3))
    before = p.detach().clone()
    text = rf"{stage} to leave its tensors where they are.*\(parameter 0.*copy_\(\)"
    with pytest.raises(RuntimeError, match=text):
        libmuon.Muon([p], algorithm=moved.name).step()
    assert torch.equal(p.detach(), before)


def test_one_call_orthogonalizes_the_matrices_of_several_parameters() -> None:
    counts = []

    class Counted(libmuon.Algorithm):
        name = fresh_name()

        def orthogonalize(self, matrices, groups):  # type: ignore[no-untyped-def]
            counts.append((len(matrices), len(groups)))
            super().orthogonalize(matrices, groups)

    libmuon.register_algorithm(Counted)
    ours = make_params((4, 3), (4, 3), (4, 3))
    theirs = clone(ours)
    libmuon.Muon(ours, algorithm=Counted.name).step()
    libmuon.Muon(theirs).step()
    assert counts == [(3, 3)]
    for a, b in zip(ours, theirs, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("whole", [False, True])
def test_stages_see_flattened_weights_as_matrices(memory_format: Any, whole: bool) -> None:
    shapes = []

    class Decaying(libmuon.Algorithm):
        name = fresh_name()
        state = {"momentum_buffer": "param", "largest": "param"}

        def refine(self, matrices, state, groups):  # type: ignore[no-untyped-def]
            for u, slots in zip(matrices, state, strict=True):
                shapes.append((u.shape, slots["largest"].shape))
                torch.maximum(slots["largest"], u.abs(), out=slots["largest"])
                u.copy_(slots["largest"])

    class Whole(Decaying):
        name = fresh_name()

        def matrix_update(self, params, grads, state, groups, factors):  # type: ignore[no-untyped-def]
            for p, g, slots in zip(params, grads, state, strict=True):
                shapes.append((p.shape, slots["largest"].shape))
                slots["largest"].add_(g)
                p.sub_(slots["largest"].cumsum(-1))

    chosen = Whole if whole else Decaying
    libmuon.register_algorithm(chosen)
    (matrix,) = make_params((4, 12))
    conv = matrix.detach().reshape(4, 3, 2, 2).contiguous(memory_format=memory_format)
    conv.requires_grad_().grad = matrix.grad.reshape(4, 3, 2, 2)  # type: ignore[union-attr]
    options = {"algorithm": chosen.name, "lr": 0.1}
    opts = [libmuon.Muon([matrix], **options), libmuon.Muon([conv], flatten=True, **options)]
    for _ in range(3):
        for opt in opts:
            opt.step()
    torch.testing.assert_close(conv.detach().reshape(4, 12), matrix.detach(), rtol=1e-12, atol=0)
    assert set(shapes) == {((1, 4, 12), (1, 4, 12))}


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_stages_see_real_pairs_as_complex_matrices(dtype: torch.dtype) -> None:
    class Turned(libmuon.Algorithm):
        name = fresh_name()

        def accumulate(self, grads, momenta, matrices, groups, grad_scale):  # type: ignore[no-untyped-def]
            for g, b, q in zip(grads, momenta, matrices, strict=True):
                b.copy_(g * 1j)
                q.copy_(b)

        def orthogonalize(self, matrices, groups):  # type: ignore[no-untyped-def]
            assert matrices.is_complex()

        def apply(self, params, matrices, groups, factors):  # type: ignore[no-untyped-def]
            for p, q in zip(params, matrices, strict=True):
                p.add_(q)

    libmuon.register_algorithm(Turned)
    p = torch.zeros(4, 3, 2, dtype=dtype).requires_grad_()
    p.grad = torch.randn(4, 3, 2).to(dtype)
    opt = libmuon.Muon([p], algorithm=Turned.name, rows=0, cols=1, complex_dim=-1)
    opt.step()
    turned = torch.stack([-p.grad[..., 1], p.grad[..., 0]], -1)
    assert torch.equal(p.detach(), turned)
    assert torch.equal(opt.state[p]["momentum_buffer"], turned)


def test_super_takes_complex_matrices() -> None:
    class Same(libmuon.Algorithm):
        name = fresh_name()

        def accumulate(self, *args):  # type: ignore[no-untyped-def]
            super().accumulate(*args)

        def apply(self, *args):  # type: ignore[no-untyped-def]
            super().apply(*args)

    libmuon.register_algorithm(Same)
    ours = make_params((4, 3), (5, 3), dtype=torch.complex128)
    theirs = clone(ours)
    for opt in (libmuon.Muon(ours, algorithm=Same.name), libmuon.Muon(theirs)):
        for _ in range(3):
            opt.step()
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-15)


def class_with(**attributes: Any) -> Any:
    return type("Wrong", (libmuon.Algorithm,), {"name": fresh_name(), **attributes})


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (lambda: int, TypeError, "subclass of libmuon.Algorithm, got <class 'int'>"),
        (lambda: class_with(name=""), ValueError, "name should be of letters"),
        (lambda: class_with(name="a;b"), ValueError, "but is: 'a;b'"),
        (lambda: class_with(name="NorMuon"), ValueError, "'normuon' is registered already"),
        (lambda: class_with(state={"b": "vector"}), ValueError, "'b': 'vector'"),
        (lambda: class_with(state={"b": "row"}), ValueError, "first state slot is the momentum"),
        (lambda: class_with(options={"lr": 1.0}), ValueError, "'lr' has a meaning already"),
        (lambda: class_with(options={"wd": 1.0}), ValueError, "'wd' has a meaning already"),
        (lambda: class_with(options={"beta2": 1.0}), ValueError, "'beta2' has a meaning already"),
        (lambda: class_with(options={"mode": "row"}), TypeError, "mode should be a number"),
    ],
)
def test_wrong_declarations_are_refused(make: Any, error: type[Exception], text: str) -> None:
    before = libmuon.registered_algorithms()
    with pytest.raises(error, match=text):
        libmuon.register_algorithm(make())
    assert libmuon.registered_algorithms() == before


def test_the_name_of_another_class_is_taken() -> None:
    first, second = class_with(), class_with()
    second.name = first.name
    second.__qualname__ = "Other"
    libmuon.register_algorithm(first)
    with pytest.raises(ValueError, match=r"registered already, by .*Wrong"):
        libmuon.register_algorithm(second)


def test_m20_reserved_names_and_state_are_protected() -> None:
    for reserved in ("params", "algorithm", "weight_decay", "cautious", "momentum", "max_lr"):
        with pytest.raises(ValueError, match="has a meaning already"):
            libmuon.register_algorithm(class_with(options={reserved: 1.0}))


def test_an_unregistered_algorithm_is_named_when_loading() -> None:
    known = class_with()
    libmuon.register_algorithm(known)
    (p,) = make_params((3, 3))
    state = copy.deepcopy(libmuon.Muon([p], algorithm=known.name).state_dict())
    state["param_groups"][0]["algorithm"] = "never-registered"
    opt = libmuon.Muon([p], algorithm=known.name)
    with pytest.raises(
        ValueError, match=r"'never-registered'; an algorithm of your own must be reg"
    ):
        opt.load_state_dict(state)
    with pytest.raises(ValueError, match="must be registered first"):
        libmuon.Muon([p], algorithm="never-registered")


def test_options_of_another_algorithm_are_refused_by_their_close_names() -> None:
    known = class_with(options={"sharpness": 1.0})
    libmuon.register_algorithm(known)
    (p,) = make_params((3, 3))
    with pytest.raises(ValueError, match="did you mean 'sharpness'"):
        libmuon.Muon([{"params": [p], "sharpnes": 2.0}], algorithm=known.name)
    with pytest.raises(ValueError, match="sharpness should be finite"):
        libmuon.Muon([{"params": [p], "sharpness": float("inf")}], algorithm=known.name)


def test_adamuon_is_what_its_paper_says() -> None:
    """Two stages over the core against a plain transcription in float64."""
    if not EXAMPLES.exists():
        pytest.skip("needs the repository's examples")
    sys.path.insert(0, str(EXAMPLES))
    import custom_algorithm as custom

    shapes = ((6, 10), (12, 5))
    params = make_params(*shapes)
    want = [p.detach().clone() for p in params]
    momenta = [torch.zeros_like(p) for p in want]
    second = [torch.zeros_like(p) for p in want]
    opt = libmuon.Muon(
        params, lr=0.02, weight_decay=0.1, nesterov=False, algorithm=custom.AdaMuon.name,
        adjust_lr_fn="match_rms_adamw",
    )  # fmt: skip
    for _ in range(4):
        for p, w, m, v in zip(params, want, momenta, second, strict=True):
            p.grad = torch.randn_like(p)
            m.mul_(0.95).add_(p.grad)
            o = exact_orthogonalize(m.sign(), [(3.4445, -4.775, 2.0315)] * 5)
            v.mul_(0.95).add_(0.05 * o * o)
            update = o / (v.sqrt() + 1e-8)
            gamma = 0.2 * (w.numel() ** 0.5) / update.norm()
            w.sub_(0.02 * (gamma * update + 0.1 * w))
        opt.step()
    for p, w in zip(params, want, strict=True):
        torch.testing.assert_close(p.detach(), w, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    ("attributes", "error", "text"),
    [
        ({"name": None}, TypeError, "Wrong.name should be a string but is: None"),
        ({"state": None}, TypeError, "Wrong.state should be a mapping by name but is: None"),
        ({"state": ["m"]}, TypeError, r"Wrong.state should be a mapping .* is: \['m'\] \(list\)"),
        ({"options": None}, TypeError, "Wrong.options should be a mapping by name but is: None"),
        ({"options": [1.0]}, TypeError, r"Wrong.options should be a mapping .* \(list\)"),
        ({"state": {1: "param"}}, TypeError, "in Wrong.state should be strings but one is: 1"),
        ({"options": {1: 0.5}}, TypeError, "in Wrong.options should be strings but one is: 1"),
        ({"state": {"": "param"}}, ValueError, "in Wrong.state should be of .* one is: ''"),
        ({"state": {"a/b": "param"}}, ValueError, "in Wrong.state .* one is: 'a/b'"),
        ({"state": {"a.b": "param"}}, ValueError, "in Wrong.state .* one is: 'a.b'"),
        ({"state": {"a b": "param"}}, ValueError, "in Wrong.state .* one is: 'a b'"),
        ({"state": {"1st": "param"}}, ValueError, "in Wrong.state .* one is: '1st'"),
        ({"state": {"a\n": "param"}}, ValueError, r"in Wrong.state .* one is: 'a\\n'"),
        ({"options": {"a-b": 0.5}}, ValueError, "in Wrong.options .* one is: 'a-b'"),
        ({"options": {"": 0.5}}, ValueError, "in Wrong.options .* one is: ''"),
        ({"options": {"mode": "row"}}, TypeError, r"'row'.* \(the default in Wrong.options\)"),
        ({"options": {"mode": float("inf")}}, ValueError, "finite .* in Wrong.options"),
    ],
)
def test_declarations_of_wrong_types_and_names_are_refused_by_their_class(
    attributes: dict[str, Any], error: type[Exception], text: str
) -> None:
    before = libmuon.registered_algorithms()
    with pytest.raises(error, match=text):
        libmuon.register_algorithm(class_with(**attributes))
    assert libmuon.registered_algorithms() == before
