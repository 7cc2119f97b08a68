"""The optimizer: groups, state and one call into the core a step; no arithmetic of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import zip_longest
from typing import Any, overload

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.optim.optimizer import ParamsT

from libmuon import checkpoint
from libmuon.describe import describe_groups, effective_lrs
from libmuon.memory import Memory, memory_of
from libmuon.options import (
    Group,
    check_defaults,
    group_checks,
    is_elementwise,
    named_parameters,
    normalize_group,
    normalize_groups,
)
from libmuon.plan import Plan, plan_key, trained_parameters
from libmuon.shapes import check_parameters, warn_of_rounding
from libmuon.spec import hyper_names, hyper_rows, hyper_values
from libmuon.spec import state_dtype as dtype_of_state

StateDict = dict[str, Any]
Coefficients = str | tuple[float, float, float] | Sequence[tuple[float, float, float]]
Dims = int | Sequence[int]


class Muon(torch.optim.Optimizer):
    """Muon, NorMuon, AdamW and Adam in one optimizer.

    Names, order, defaults and results of the arguments up to `adjust_lr_fn` are those of
    ``torch.optim.Muon``; everything else is keyword-only. Every option may also stand in a
    parameter group. Some stand only there: `betas` (0.9, 0.95) and `amsgrad` (False) in "adam" and
    "adamw" groups, `muon_beta2` (0.95) in "normuon" groups. A group's other keys are metadata.

    Args:
        params: parameters, named parameters or group dicts, as every torch optimizer takes them;
            or a whole ``nn.Module``, which `group_parameters` then divides between Muon and AdamW
            with ``adjust_lr_fn="match_rms_adamw"``, so that one `lr` serves both.
        lr: learning rate; a number or a one-element tensor. A group of another kind than
            `algorithm` (Adam beside Muon) needs its own, unless every matrix group uses
            ``adjust_lr_fn="match_rms_adamw"``.
        weight_decay: decoupled weight decay. Groups of another kind than `algorithm` do not inherit
            it, nor `eps`: their defaults are 0.01 and 1e-8 (adamw), 0 and 1e-8 (adam, coupled).
        momentum: factor of the momentum, 0 to 1.
        nesterov: whether the update looks ahead.
        ns_coefficients: a triple (a, b, c), one triple a step, or a schedule's name
            (see `schedules`).
        eps: lower bound of the norm that a matrix is divided by; 0 makes the step scale-free. In an
            Adam group, Adam's eps.
        ns_steps: number of iterations; None is the schedule's own length, 5 for a single triple.
        adjust_lr_fn: factor on `lr` by the matrix's shape. None or "original":
            sqrt(max(1, rows/cols)); "match_rms_adamw": 0.2 sqrt(max(rows, cols));
            "spectral_unclamped": sqrt(rows/cols); "unscaled": 1.
        algorithm: "muon", "normuon", "adamw", "adam" or a registered name. Group dicts may also say
            ``use_muon=True/False`` or ``optimizer="adamw"``.
        rows, cols: dims that make the rows and the columns of a matrix; other dims are a batch.
        flatten: rows = dim 0, columns = all other dims.
        batch_dims: the first so many dims are a batch of matrices.
        complex_dim: index of the last dim (or -1) if it holds real and imaginary parts.
        split_sizes: sizes of blocks of rows that are matrices of their own.
        num_heads: that many equal blocks instead.
        split_dim: 0 for blocks of rows, 1 for blocks of columns.
        maximize: maximize the objective.
        cautious: decay only entries where update and parameter agree in sign.
        compute_dtype: "auto" or the dtype whose error bound the iteration meets.
        state_dtype: dtype of momentum and moments; None is the gradient's. "int8", "fp8" (1.03
            bytes an entry) and "int4" (0.53) keep codes in blocks of 128 along a row, each with a
            float32 scale.
        nonfinite: "propagate" a NaN or infinity of a gradient into its own matrix, as torch does,
            or "skip" that matrix and count it in `skipped`.
        lr_multiplier: constant factor on `lr` in the update, not in the decay.
        batch_size: matrices computed together at most.
        momentum_form: "ema", b = momentum b + (1 - momentum) g, or "heavy_ball",
            b = momentum b + g.
        normalization, norm_factor: how a matrix is scaled before the iteration; None is the
            schedule's. "clamp" divides by max(norm_factor |X|, eps), "add" by
            norm_factor |X| + eps.
        decay_lr: decay by "lr", or by "adjusted" = lr * lr_multiplier * shape factor.
        form: how the iteration is carried out; "auto" chooses.
        fused: True requires the fused loops, which CPU tensors always take.
        foreach: False computes one matrix at a time.
        capturable: accepted as torch does; a step on the CPU is never captured.
        differentiable: True is refused.
        deterministic: None follows torch's flag. On the CPU every step is deterministic.
        stochastic_rounding: steps of bfloat16 parameters are computed in float32 and rounded up or
            down at random, so that they are exact on average; the numbers depend on step, parameter
            and entry alone.
        master: "split" keeps 16 more bits of each bfloat16 entry in the state: float32 steps.
        offload: the state lives in host memory (pinned, beside a GPU) and travels through the
            device piece by piece while others are computed.
    """

    _step_supports_amp_scaling = True

    # Caches, rebuilt when missing: pickling and copying keep groups and state alone.
    _plan: Plan | None = None
    _hyper: Tensor | None = None
    _hyper_values: Sequence[tuple[Any, ...]] = ()
    _skipped: Tensor | None = None
    _constructed = True

    def __init__(
        self,
        params: ParamsT | nn.Module,
        lr: float | Tensor = 1e-3,
        weight_decay: float | Tensor = 0.1,
        momentum: float | Tensor = 0.95,
        nesterov: bool = True,
        ns_coefficients: Coefficients = (3.4445, -4.775, 2.0315),
        eps: float = 1e-7,
        ns_steps: int | None = None,
        adjust_lr_fn: str | None = None,
        *,
        algorithm: str = "muon",
        rows: Dims | None = None,
        cols: Dims | None = None,
        flatten: bool = False,
        batch_dims: int | None = None,
        complex_dim: int | None = None,
        split_sizes: Sequence[int] | None = None,
        num_heads: int | None = None,
        split_dim: int = 0,
        maximize: bool = False,
        cautious: bool = False,
        compute_dtype: str | torch.dtype = "auto",
        state_dtype: str | torch.dtype | None = None,
        nonfinite: str = "propagate",
        lr_multiplier: float = 1.0,
        batch_size: int | None = None,
        momentum_form: str = "ema",
        normalization: str | None = None,
        norm_factor: float | None = None,
        decay_lr: str = "lr",
        form: str = "auto",
        fused: bool | None = None,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        deterministic: bool | None = None,
        stochastic_rounding: bool = False,
        master: str | None = None,
        offload: bool = False,
    ) -> None:
        defaults = check_defaults(locals())
        self._constructed = False  # shapes are checked at the end, all groups in one message
        super().__init__(_as_groups(params, defaults), defaults)
        check_parameters(self.param_groups)
        warn_of_rounding(self.param_groups)
        self._constructed = True

    def add_param_group(self, param_group: Group) -> None:
        """Adds a group; an error leaves the optimizer, and `param_group`, as they were."""
        if not isinstance(param_group, dict):
            raise TypeError(f"param_group must be a dict, but got {type(param_group)}")
        start = len(self.param_groups)
        (group,) = normalize_groups([param_group], self.defaults, self.param_groups)
        super().add_param_group(group)
        if not self._constructed:
            return
        try:
            check_parameters([group], start)
            warn_of_rounding([group])
        except Exception:
            self.param_groups.pop()
            raise

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Updates every parameter that has a gradient; returns the closure's loss.

        A step that raises because of an option or a gradient has changed nothing.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._update()
        return loss

    # Out of the reach of torch.compile: the core compiles nothing, and tracing would specialise on
    # every learning rate.
    @_disable_dynamo
    def _update(self) -> None:
        plan, params = self._current_plan()
        if not params:
            return
        grads = [param.grad for param in params]
        for group, name, grad in zip(plan.groups, plan.names, grads, strict=True):
            if grad is not None and grad.layout is not torch.strided:
                _raise_sparse(self.param_groups[group]["algorithm"], name)
        hyper = self._current_hyper()
        torch.ops.muon.step_(
            plan.handle,
            params,
            grads,
            self._current_state(plan, params),
            hyper,
            grad_scale=_tensor_or_none(getattr(self, "grad_scale", None)),
            found_inf=_tensor_or_none(getattr(self, "found_inf", None)),
            skipped=self._skipped,
        )

    def _current_plan(self) -> tuple[Plan, list[Tensor]]:
        """The plan, built anew if groups, parameters or structural options have changed."""
        trained = list(trained_parameters(self.param_groups, self.state))
        plan = self._plan
        if plan is None or plan.key != plan_key(self.param_groups, trained):
            plan = self._rebuild(trained)
        return plan, [param for _, param in trained]

    def _rebuild(self, trained: list[tuple[int, Tensor]]) -> Plan:
        checked = [normalize_group(group, self.defaults) for group in self.param_groups]
        check_parameters(checked)
        for group, new in zip(self.param_groups, checked, strict=True):
            group.update(new)
        plan = Plan(self.param_groups, trained, plan_key(self.param_groups, trained))
        self._skipped = plan.carried_over(self._plan, self._skipped)
        self._drop_stale_state(self._plan, plan, [param for _, param in trained])
        self._plan = plan
        return plan

    def _drop_stale_state(self, old: Plan | None, new: Plan, params: list[Tensor]) -> None:
        """Drops the state of replaced parameters, and what a former algorithm or shape kept."""
        live = {id(param) for group in self.param_groups for param in group["params"]}
        for key in list(self.state):
            if isinstance(key, Tensor) and id(key) not in live:
                del self.state[key]
        former = {} if old is None else dict(zip(old.ids, old.slots, strict=True))
        for param, slots, group, name in zip(params, new.slots, new.groups, new.names, strict=True):
            before = former.get(id(param), slots)
            if before != slots and param in self.state:
                self.state[param] = checkpoint.adapted_entry(
                    self.param_groups[group], name, param, self.state[param], before
                )

    def _current_state(self, plan: Plan, params: list[Tensor]) -> list[Tensor]:
        """The state in the core's order; what is missing is created."""
        flat = []
        for group, slots, param in zip(plan.groups, plan.slots, params, strict=True):
            entry = self.state[param]
            for slot in slots:
                tensor = entry.get(slot.name)
                offload = self.param_groups[group]["offload"]
                if tensor is None:
                    dtype = dtype_of_state(self.param_groups[group], param)
                    tensor = entry[slot.name] = slot.create(param, dtype, offload)
                elif offload or tensor.device != param.device:
                    tensor = entry[slot.name] = slot.placed(tensor, param, offload)
                flat.append(tensor)
        return flat

    def _current_hyper(self) -> Tensor:
        """The numbers of every group as they are now; what has changed is checked."""
        values = [hyper_values(group) for group in self.param_groups]
        if self._hyper is None or tuple(values) != self._hyper_values:
            for group, new, old in zip_longest(
                self.param_groups, values, self._hyper_values[: len(values)]
            ):
                _check_changed(group, new, old or ())
            self._hyper = torch.tensor(hyper_rows(values), dtype=torch.float64)
            self._hyper_values = tuple(values)
        return self._hyper

    def state_dict(self) -> StateDict:
        """The optimizer's state and groups, as every torch optimizer returns them.

        State that no step has created yet is created, so that all ranks, and saves before the first
        step, have the same keys.
        """
        self._current_state(*self._current_plan())
        return super().state_dict()

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Loads a state dict of this class or of torch.optim.Muon, as a whole or not at all.

        Hyperparameters become those of the file. How this run stores and computes (`state_dtype`,
        `batch_size`, `form`, `fused`, `foreach`, `capturable`, `deterministic`) stays; state gets
        the dtype that this run would have created, and shares no memory with `state_dict`.
        """

        def resolve(_: torch.optim.Optimizer, loaded: StateDict) -> StateDict:
            return checkpoint.resolve(self.param_groups, self.defaults, loaded)

        # Registered last, so that it sees what the user's own hooks have made of the file.
        handle = self.register_load_state_dict_pre_hook(resolve)
        try:
            super().load_state_dict(state_dict)
        finally:
            handle.remove()

    def __setstate__(self, state: StateDict) -> None:
        super().__setstate__(state)
        for group in self.param_groups:  # pickled before an option existed
            for name, default in self.defaults.items():
                group.setdefault(name, default)

    @property
    def skipped(self) -> dict[str, int]:
        """By parameter, how many of its matrices ``nonfinite="skip"`` has left alone so far."""
        if self._plan is None or self._skipped is None:
            return {}
        counts = zip(self._plan.names, self._skipped.tolist(), strict=True)
        return {name: count for name, count in counts if count}

    def memory(self) -> Memory:
        """How many bytes state, scales, remainders and the workspace of a step take, by group."""
        plan, params = self._current_plan()
        return memory_of(self.param_groups, plan, params, self.state)

    def effective_lr(self, param: Tensor) -> list[float]:
        """The product lr * lr_multiplier * shape factor of each matrix shape in `param`.

        One value, unless `split_sizes` or `num_heads` divides the parameter.
        """
        for group, name, candidate in named_parameters(self.param_groups):
            if candidate is param:
                return effective_lrs(group, param, name)
        raise ValueError(f"no parameter of this optimizer: a tensor of shape {tuple(param.shape)}")

    def describe(self) -> str:
        """A table of every parameter, then the totals of each algorithm.

        Columns: name, shape, how it is matrices, algorithm, why, effective learning rate,
        lr * weight decay, shape factor.
        """
        return describe_groups(self.param_groups)


def _as_groups(params: ParamsT | nn.Module, defaults: Group) -> Any:
    """Complete groups; what is no list of parameters or groups is left to the base class."""
    if isinstance(params, nn.Module):
        return normalize_groups(_module_groups(params, defaults), defaults)
    if isinstance(params, Tensor | set):
        return params
    given: list[Any] = list(params)
    if not given or not isinstance(given[0], dict):
        return normalize_groups([{"params": given}], defaults) if given else given
    for group in given:
        if not isinstance(group, dict):
            raise TypeError(f"param_group must be a dict, but got {type(group)}")
    return normalize_groups(given, defaults)


def _module_groups(model: nn.Module, defaults: Group) -> list[Group]:
    """The model's groups; the constructor's `algorithm` and `adjust_lr_fn` are the matrices'."""
    from libmuon.groups import group_parameters

    own = {"algorithm": defaults["algorithm"]}
    if defaults["adjust_lr_fn"] is None:
        defaults["adjust_lr_fn"] = "match_rms_adamw"
    else:
        own["adjust_lr_fn"] = defaults["adjust_lr_fn"]
    return [
        group if is_elementwise(group.get("algorithm", "muon")) else {**group, **own}
        for group in group_parameters(model)
    ]


def _check_changed(group: Group, new: tuple[Any, ...], old: tuple[Any, ...]) -> None:
    known = group_checks(group["algorithm"])
    for name, value, before in zip_longest(hyper_names(group), new, old):
        if value is not None and value != before:
            known[name](name, value)


def _tensor_or_none(value: Any) -> Tensor | None:
    return value if isinstance(value, Tensor) else None


def _raise_sparse(algorithm: str, name: str) -> None:
    who, instead = "Muon", "densify the gradient, or leave the parameter to torch.optim.SparseAdam"
    if is_elementwise(algorithm):
        who, instead = "Adam", "please consider SparseAdam instead"
    raise RuntimeError(f"{who} does not support sparse gradients, {instead} ({name})")
