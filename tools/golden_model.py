"""The formulas behind tests/golden, in plain torch, one parameter at a time.

Everything is written for being read next to the paper, not for speed, and shares nothing with
libmuon. tests/golden/README.md explains the option names.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

Options = dict[str, Any]


class Precision(NamedTuple):
    """dtypes of one run: of parameters, gradients and state, and of the iteration."""

    stored: torch.dtype
    iterated: torch.dtype


FP64 = Precision(torch.float64, torch.float64)
FP32 = Precision(torch.float32, torch.float32)
BF16 = Precision(torch.float32, torch.bfloat16)


def divisor(x: Tensor, options: Options) -> Tensor:
    """What a matrix is divided by before the iteration."""
    norm = options["norm_factor"] * torch.linalg.matrix_norm(x, keepdim=True)
    eps = options["eps"]
    return norm.clamp(min=eps) if options["norm"] == "clamp" else norm + eps


def orthogonalize(x: Tensor, options: Options, precision: Precision) -> Tensor:
    """The quintic iteration X <- aX + (bA + cA^2)X with A = XX^T, matrix by matrix."""
    y = x.to(precision.iterated)
    tall = y.shape[-2] > y.shape[-1]
    y = y.mT if tall else y
    y = y / divisor(y, options)
    for a, b, c in options["coefficients"]:
        gram = y @ y.mT
        y = a * y + (b * gram + c * (gram @ gram)) @ y
    return (y.mT if tall else y).to(precision.stored)


def orthogonalize_by_svd(x: Tensor, options: Options) -> Tensor:
    """The same function of a float64 matrix by its definition: U p(S) V^T with a scalar p."""
    u, s, vh = torch.linalg.svd(x, full_matrices=False)
    s = s / divisor(x, options).squeeze(-1)
    for a, b, c in options["coefficients"]:
        s = a * s + b * s**3 + c * s**5
    return (u * s.unsqueeze(-2)) @ vh


def shape_factor(mode: str, rows: int, cols: int) -> float:
    if mode == "original":
        return math.sqrt(max(1.0, rows / cols))
    if mode == "match_rms_adamw":
        return 0.2 * math.sqrt(max(rows, cols))
    assert mode == "spectral_unclamped", mode
    return math.sqrt(rows / cols)


def matrix_sides(shape: list[int], flatten: bool) -> tuple[int, int]:
    """Rows and columns: (first dim, all others) if flattened, else the last two dims."""
    return (shape[0], math.prod(shape[1:])) if flatten else (shape[-2], shape[-1])


def normuon(u: Tensor, variance: Tensor, beta2: float) -> tuple[Tensor, Tensor]:
    """Rows divided by their running RMS, Frobenius norm kept. [..., rows, cols], [..., rows, 1]."""
    variance = variance + (1 - beta2) * (u.square().mean(-1, keepdim=True) - variance)
    scaled = u / (variance.sqrt() + 1e-8)
    before = torch.linalg.matrix_norm(u, keepdim=True)
    after = torch.linalg.matrix_norm(scaled, keepdim=True).clamp(min=1e-8)
    return scaled * before / after, variance


def momentum_step(buffer: Tensor, grad: Tensor, mu: float, form: str) -> Tensor:
    return mu * buffer + (grad if form == "heavy_ball" else (1 - mu) * grad)


def momentum_input(buffer: Tensor, grad: Tensor, mu: float, form: str, nesterov: bool) -> Tensor:
    """What is orthogonalised; Nesterov is one more momentum step that is not stored."""
    return momentum_step(buffer, grad, mu, form) if nesterov else buffer


def muon_step(
    param: Tensor, grad: Tensor, state: dict[str, Tensor], o: Options, precision: Precision
) -> tuple[Tensor, Tensor]:
    """One step. Updates `state`; returns the new parameter and the update before lr and decay."""
    grad = -grad if o["maximize"] else grad
    mu, form = o["momentum"], o["momentum_form"]
    buffer = momentum_step(state.get("momentum_buffer", torch.zeros_like(param)), grad, mu, form)
    state["momentum_buffer"] = buffer
    q = momentum_input(buffer, grad, mu, form, o["nesterov"])

    rows, cols = matrix_sides(list(param.shape), o["flatten"])
    matrices = (rows, cols) if o["flatten"] else tuple(param.shape)
    q, p = q.reshape(matrices), param.reshape(matrices)
    heights = o["split_sizes"] or [rows]
    whole = shape_factor(o["scale"], rows, cols)
    updates, factors, variances = [], [], []
    old = state.get("variance_neuron", torch.zeros_like(q[..., :1]))
    for block, old_block, height in zip(
        q.split(heights, -2), old.split(heights, -2), heights, strict=True
    ):
        u = orthogonalize(block, o["ortho"], precision)
        factor = shape_factor(o["scale"], height, cols)
        if o["split_rule"] == "muonium":  # the block's own factor inside u, the whole one outside
            u, factor = u * (factor / whole), whole
        if o["normuon_beta2"] is not None:
            u, variance = normuon(u, old_block, o["normuon_beta2"])
            variances.append(variance)
        updates.append(u)
        factors.append(torch.full_like(u, factor))
    u, factor = torch.cat(updates, -2), torch.cat(factors, -2)
    if variances:
        state["variance_neuron"] = torch.cat(variances, -2)

    decay = p * o["weight_decay"]
    if o["decay"] == "cautious":
        decay = decay * (u * p > 0)
    decay_lr = o["lr"] * factor if o["decay_lr"] == "lr*scale" else o["lr"]
    return (p - decay_lr * decay - o["lr"] * factor * u).reshape(param.shape), u.reshape(
        param.shape
    )


def adamw_step(param: Tensor, grad: Tensor, state: dict[str, Any], o: Options) -> Tensor:
    """One step of decoupled Adam with bias correction. Updates `state`."""
    (b1, b2), t = o["betas"], state.get("step", 0) + 1
    mean = b1 * state.get("exp_avg", torch.zeros_like(param)) + (1 - b1) * grad
    square = b2 * state.get("exp_avg_sq", torch.zeros_like(param)) + (1 - b2) * grad.square()
    state.update(step=t, exp_avg=mean, exp_avg_sq=square)
    denominator = square.sqrt() / math.sqrt(1 - b2**t) + o["eps"]
    return param * (1 - o["lr"] * o["weight_decay"]) - o["lr"] / (1 - b1**t) * mean / denominator


def run_optimizer(options: Options, inputs: Options, precision: Precision) -> Options:
    """`expected` of an optimizer case: what every parameter and its state is after each step."""
    params = {name: value.to(precision.stored) for name, value in inputs["params"].items()}
    state: dict[str, dict[str, Any]] = {name: {} for name in params}
    steps: list[dict[str, dict[str, Tensor]]] = []
    for grads in inputs["grads"]:
        record: dict[str, dict[str, Tensor]] = {"params": {}, "update": {}, "momentum_buffer": {}}
        for name in params:
            if grads[name] is not None:
                grad = grads[name].to(precision.stored)
                if options["route"][name] == "muon":
                    params[name], record["update"][name] = muon_step(
                        params[name], grad, state[name], options["muon"], precision
                    )
                else:
                    params[name] = adamw_step(params[name], grad, state[name], options["adamw"])
            record["params"][name] = params[name]
            for key, value in state[name].items():
                if isinstance(value, Tensor):
                    record.setdefault(key, {})[name] = value
        steps.append(record)
    return {"steps": steps}


def run_momentum(options: Options, inputs: Options, precision: Precision) -> Options:
    """Both momentum forms side by side, and each converted to the other after some step."""
    grads = [g.to(precision.stored) for g in inputs["grads"]]
    buffers = {form: torch.zeros_like(grads[0]) for form in ("heavy_ball", "ema")}
    steps: list[dict[str, Tensor]] = []
    for mu, grad in zip(options["momentum"], grads, strict=True):
        buffers = {form: momentum_step(b, grad, mu, form) for form, b in buffers.items()}
        inputs_of = {
            f"ortho_input_{form}": momentum_input(b, grad, mu, form, options["nesterov"])
            for form, b in buffers.items()
        }
        steps.append({**buffers, **inputs_of})

    after = options["convert_after_step"]
    ratio = 1 - options["momentum"][after - 1]
    as_ema, as_heavy_ball = steps[after - 1]["heavy_ball"] * ratio, steps[after - 1]["ema"] / ratio
    mu, grad = options["momentum"][after], grads[after]
    conversion = {
        "heavy_ball_as_ema": as_ema,
        "ema_as_heavy_ball": as_heavy_ball,
        "next_ema_after_conversion": momentum_step(as_ema, grad, mu, "ema"),
        "next_heavy_ball_after_conversion": momentum_step(as_heavy_ball, grad, mu, "heavy_ball"),
    }
    return {"steps": steps, "conversion": conversion}


def compute(case: Options, precision: Precision = FP64) -> Options:
    """`expected` of any case."""
    options, inputs = case["options"], case["inputs"]
    if "x" in inputs:
        return {"output": orthogonalize(inputs["x"], options, precision)}
    if "shapes" in inputs:
        sides = [matrix_sides(shape, options["flatten"]) for shape in inputs["shapes"]]
        return {"factors": [shape_factor(options["scale"], *side) for side in sides]}
    run = run_optimizer if "params" in inputs else run_momentum
    return run(options, inputs, precision)
