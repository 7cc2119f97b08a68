"""Names, options and inputs of every golden case, file by file.

Expected values and tolerances are computed from these by make_golden.py; names and options are
explained in tests/golden/README.md.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from golden_inputs import MATRICES, MATRIX_PARAMS, TALL_GRADS, param_and_grads

Case = dict[str, Any]

# --- options -------------------------------------------------------------------------------------

QUINTIC_ROW = (3.4445, -4.7750, 2.0315)
POLAR_EXPRESS_ROWS = [
    (8.156554524902461, -22.48329292557795, 15.878769915207462),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
    (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
]


def ortho(
    method: str, rows: list[tuple[float, float, float]], norm: str, factor: float, eps: float
) -> Case:
    coefficients = [list(row) for row in rows]
    return {
        "method": method,
        "steps": len(rows),
        "coefficients": coefficients,
        "norm": norm,
        "norm_factor": factor,
        "eps": eps,
    }


def quintic(steps: int = 5, norm: str = "add") -> Case:
    return ortho("newton_schulz", [QUINTIC_ROW] * steps, norm, 1.0, 1e-7)


def polar_express(steps: int = 5, factor: float = 1.02, eps: float = 1e-7) -> Case:
    rows = POLAR_EXPRESS_ROWS[:steps] + POLAR_EXPRESS_ROWS[-1:] * (steps - len(POLAR_EXPRESS_ROWS))
    return ortho("polar_express", rows, "add", factor, eps)


def muon_options(**changes: Any) -> Case:
    options = {
        "lr": 0.1,
        "weight_decay": 0.1,
        "momentum": 0.95,
        "nesterov": True,
        "maximize": False,
        "momentum_form": "heavy_ball",
        "scale": "original",
        "decay": "plain",
        "decay_lr": "lr",
        "flatten": False,
        "split_sizes": None,
        "split_rule": "separate",
        "normuon_beta2": None,
        "ortho": quintic(),
    }
    assert changes.keys() <= options.keys(), changes
    return options | changes


def adamw_options(**changes: Any) -> Case:
    return {"lr": 0.01, "weight_decay": 0.1, "betas": [0.9, 0.95], "eps": 1e-8} | changes


# --- cases ---------------------------------------------------------------------------------------


def case(name: str, source: str, options: Case, inputs: Case) -> Case:
    return {"name": name, "source": source, "options": options, "inputs": inputs}


def ortho_case(name: str, source: str, matrix: str, options: Case) -> Case:
    return case(f"{name}/{matrix}", source, options, {"x": MATRICES[matrix]})


def optimizer_case(
    name: str,
    source: str,
    names: tuple[str, ...],
    muon: Case | None = None,
    adamw: Case | None = None,
    adamw_names: tuple[str, ...] = (),
    missing: tuple[tuple[int, str], ...] = (),
    zero: tuple[tuple[int, str], ...] = (),
) -> Case:
    """Three steps; `missing` and `zero` list (step, parameter) whose gradient is none or zero."""
    params, grads = {}, [{}, {}, {}]
    for key in names + adamw_names:
        params[key], series = param_and_grads(key)
        for step, grad in enumerate(series):
            empty = torch.zeros_like(grad) if (step, key) in zero else grad
            grads[step][key] = None if (step, key) in missing else empty
    options: Case = {"route": dict.fromkeys(names, "muon") | dict.fromkeys(adamw_names, "adamw")}
    options |= {} if muon is None else {"muon": muon}
    options |= {} if adamw is None else {"adamw": adamw}
    return case(name, source, options, {"params": params, "grads": grads})


def ns_quintic() -> Iterator[Case]:
    for norm, source in [
        ("clamp", "torch.optim.Muon 2.15.0 (norm clamped at eps)"),
        (
            "add",
            "KellerJordan/Muon, neuralops, QKANMuon, muonium newton_schulz (eps added to the norm)",
        ),
    ]:
        for matrix in MATRICES:
            yield ortho_case(f"quintic/{norm}", source, matrix, quintic(norm=norm))
    for steps in (0, 1, 2, 3, 4, 6, 10):
        yield ortho_case(
            f"quintic/steps_{steps}", "number of iterations", "tall_4x2", quintic(steps)
        )
    classical = ortho("newton_schulz", [(1.875, -1.25, 0.375)] * 12, "add", 1.0, 1e-7)
    source = (
        "coefficients given by the caller: (15/8, -5/4, 3/8), 12 steps, "
        "converges to the polar factor"
    )
    yield ortho_case("quintic/classical_12", source, "square_4x4", classical)


def polar_express_cases() -> Iterator[Case]:
    for label, source, options in [
        (
            "1.02+1e-7",
            "muonium polar_express; the same table and factor in microsoft/dion",
            polar_express(),
        ),
        (
            "1.01+1e-6",
            "karpathy/nanochat normalisation, same table",
            polar_express(factor=1.01, eps=1e-6),
        ),
    ]:
        for matrix in MATRICES:
            yield ortho_case(f"polar_express/{label}", source, matrix, options)
    for steps in (1, 2, 3, 4, 6, 8):
        longer = "last row repeated (libmuon; muonium refuses more than 5)"
        source = "muonium: table cut short" if steps < 5 else longer
        yield ortho_case(f"polar_express/steps_{steps}", source, "tall_4x2", polar_express(steps))


def scale_factors() -> Iterator[Case]:
    shapes = [
        [4, 4],
        [4, 2],
        [2, 4],
        [1, 5],
        [5, 1],
        [4096, 1024],
        [1024, 4096],
        [10, 10],
        [2, 3, 2],
    ]
    shapes += [[16, 8, 3, 3], [256, 1, 3, 3]]
    source = (
        "original: KellerJordan/Muon, torch, muonium, neuralops, QKANMuon(match_adamw_rms=False); "
        "match_rms_adamw: Moonlight, torch, QKANMuon; spectral_unclamped: torch 2.15"
    )
    for scale in ("original", "match_rms_adamw", "spectral_unclamped"):
        for flatten in (True, False):
            name = f"scale/{scale}/{'flatten' if flatten else 'batch'}"
            yield case(name, source, {"scale": scale, "flatten": flatten}, {"shapes": shapes})


def momentum_conversion() -> Iterator[Case]:
    source = (
        "heavy-ball (muonium, neuralops, QKANMuon, Moonlight, dion) "
        "and EMA (torch.optim.Muon, KellerJordan/Muon)"
    )
    rule = "ema = (1 - mu) * heavy_ball, mu of the last finished step"
    series = {
        "constant_mu": [0.95] * 3,
        "constant_mu_0.9": [0.9] * 3,
        "changing_mu": [0.9, 0.95, 0.95],
    }
    for label, momentum in series.items():
        for nesterov in (True, False):
            options = {
                "momentum": momentum,
                "nesterov": nesterov,
                "convert_after_step": 2,
                "rule": rule,
            }
            name = f"momentum/{label}/{'nesterov' if nesterov else 'plain'}"
            yield case(name, source, options, {"grads": TALL_GRADS})


def torch_muon() -> Iterator[Case]:
    source, clamp = "torch.optim.Muon 2.15.0", quintic(norm="clamp")

    def options(**changes: Any) -> Case:
        return muon_options(**({"momentum_form": "ema", "ortho": clamp} | changes))

    scales = {
        True: ("original", "match_rms_adamw", "spectral_unclamped"),
        False: ("original", "match_rms_adamw"),
    }
    for nesterov in (True, False):
        for scale in scales[nesterov]:
            for decay in (0.1,) if scale == "spectral_unclamped" else (0.1, 0.0):
                name = f"torch/{'nesterov' if nesterov else 'plain'}/{scale}/wd_{decay}"
                names = MATRIX_PARAMS if decay else ("tall", "wide")
                muon = options(nesterov=nesterov, scale=scale, weight_decay=decay)
                yield optimizer_case(name, source, names, muon)
    yield optimizer_case("torch/momentum_0", source, ("tall",), options(momentum=0.0))
    yield optimizer_case("torch/ns_steps_3", source, ("tall",), options(ortho=quintic(3, "clamp")))
    rule = "; no gradient: nothing moves, zero gradient: momentum and decay go on"
    yield optimizer_case(
        "torch/missing_and_zero_grad",
        source + rule,
        ("tall", "wide"),
        options(),
        missing=((1, "tall"),),
        zero=((0, "wide"), (1, "wide")),
    )


# muonium's own rules, and the same without its coupling of decay and blocks to the shape factor
FIXED: Case = {"decay": "cautious", "ortho": polar_express()}
MUONIUM = FIXED | {"decay_lr": "lr*scale", "split_rule": "muonium"}
PAIR = ("tall", "wide")


def muonium_muon() -> Iterator[Case]:
    def own(name: str, names: tuple[str, ...], note: str = "", **changes: Any) -> Case:
        return optimizer_case(
            f"muonium/{name}", "muonium 0.2.0" + note, names, muon_options(**MUONIUM | changes)
        )

    yield own("default", MATRIX_PARAMS)
    yield own("plain_decay", MATRIX_PARAMS, decay="plain")
    yield own("wd_0", PAIR, weight_decay=0.0)
    yield own("no_nesterov", PAIR, nesterov=False)
    yield own("newton_schulz", PAIR, ortho=quintic())
    yield own("newton_schulz_plain_decay", PAIR, ortho=quintic(), decay="plain")
    yield own("maximize", ("tall",), maximize=True)
    yield own("experts_3d", ("experts",), "; 3D = batch of matrices")
    yield own("conv_flatten", ("conv",), "; flatten=True", flatten=True)
    yield own("conv_fold", ("conv",), "; flatten=False on 4D: leading dims are the batch")
    yield own("split_1_3", ("tall",), split_sizes=[1, 3])
    yield own("split_1_3_wd_0", ("tall",), split_sizes=[1, 3], weight_decay=0.0)
    yield own("split_3_2_1", ("fused",), split_sizes=[3, 2, 1])
    note = "; zero gradient before any momentum: mask is false, nothing moves"
    yield optimizer_case(
        "muonium/missing_and_zero_grad",
        "muonium 0.2.0" + note,
        PAIR,
        muon_options(**MUONIUM),
        missing=((1, "tall"),),
        zero=((0, "wide"),),
    )

    def fixed(name: str, names: tuple[str, ...], note: str, **changes: Any) -> Case:
        source = "libmuon fix of muonium" + note
        return optimizer_case(
            f"muonium_fixed/{name}", source, names, muon_options(**FIXED | changes)
        )

    by_lr = ": decay by lr*wd, not lr*scale*wd"
    yield fixed("default", MATRIX_PARAMS, by_lr)
    yield fixed("plain_decay", MATRIX_PARAMS, by_lr, decay="plain")
    note = ": cautious decay by lr*wd with the RMS-matching scale"
    yield fixed("match_rms_adamw", PAIR, note, scale="match_rms_adamw")
    yield fixed("split_1_3", ("tall",), ": equal to two separate parameters", split_sizes=[1, 3])
    yield fixed(
        "split_3_2_1", ("fused",), ": equal to three separate parameters", split_sizes=[3, 2, 1]
    )
    yield fixed("conv_flatten", ("conv",), "", flatten=True)


def muonium_normuon() -> Iterator[Case]:
    source = "muonium 0.2.0 normuon"

    def options(base: Case = MUONIUM, **changes: Any) -> Case:
        return muon_options(normuon_beta2=0.95, **base | changes)

    yield optimizer_case("normuon/default", source, MATRIX_PARAMS, options())
    yield optimizer_case("normuon/plain_decay", source, PAIR, options(decay="plain"))
    yield optimizer_case("normuon/newton_schulz", source, PAIR, options(ortho=quintic()))
    yield optimizer_case("normuon/experts_3d", source, ("experts",), options())
    yield optimizer_case("normuon/split_1_3", source, ("tall",), options(split_sizes=[1, 3]))
    yield optimizer_case(
        "normuon/zero_grad",
        source + "; zero gradient gives a zero update, never NaN",
        PAIR,
        options(),
        zero=((0, "tall"), (0, "wide"), (1, "wide"), (2, "wide")),
    )
    source = "libmuon fix of muonium normuon"
    yield optimizer_case(
        "normuon_fixed/default", source + ": decay by lr*wd", MATRIX_PARAMS, options(FIXED)
    )
    note = ": equal to two separate parameters, variance of the unscaled rows"
    yield optimizer_case(
        "normuon_fixed/split_1_3", source + note, ("tall",), options(FIXED, split_sizes=[1, 3])
    )


def neuralops_qkan_adamw() -> Iterator[Case]:
    slow = {"betas": [0.9, 0.999]}  # the second half's decay rates in neuralops and QKANMuon
    source = "torch.optim.AdamW; the AdamW side of all three systems"
    yield optimizer_case(
        "adamw/tall", source, (), adamw=adamw_options(), adamw_names=("tall", "bias")
    )
    no_decay = adamw_options(weight_decay=0.0, **slow)
    yield optimizer_case(
        "adamw/wd_0", "torch.optim.AdamW", (), adamw=no_decay, adamw_names=("bias",)
    )

    source = "neuralops MuonAdamW: heavy-ball, no Nesterov, decay by lr*wd"
    plain = muon_options(nesterov=False)
    yield optimizer_case("neuralops/muon", source, MATRIX_PARAMS, plain)
    yield optimizer_case("neuralops/muon_wd_0", source, PAIR, plain | {"weight_decay": 0.0})
    yield optimizer_case(
        "neuralops/muon_adamw_defaults",
        source + "; the constructor's defaults",
        PAIR,
        plain | {"lr": 0.02, "weight_decay": 0.01},
        adamw_options(lr=5e-5, weight_decay=0.01, **slow),
        ("bias", "gain"),
    )
    yield optimizer_case(
        "neuralops/muon_adamw",
        source,
        ("tall", "square"),
        plain,
        adamw_options(**slow),
        ("bias",),
        missing=((1, "bias"),),
    )

    source = "qkan 0.2.3 QKANMuon"
    for label, scale in [("match_adamw_rms", "match_rms_adamw"), ("vanilla", "original")]:
        for nesterov in (True, False):
            name = f"qkan/{label}/{'nesterov' if nesterov else 'plain'}"
            yield optimizer_case(
                name, source, MATRIX_PARAMS, muon_options(scale=scale, nesterov=nesterov)
            )
    muon = muon_options(lr=0.02, scale="match_rms_adamw")
    yield optimizer_case(
        "qkan/defaults_with_adamw",
        source + "; the constructor's defaults, one weight_decay for both halves",
        PAIR,
        muon | {"weight_decay": 0.0},
        adamw_options(lr=3e-3, weight_decay=0.0, **slow),
        ("bias",),
    )
    yield optimizer_case(
        "qkan/wd_with_adamw", source, PAIR, muon, adamw_options(lr=3e-3, **slow), ("bias", "gain")
    )


FILES = {
    "ns_quintic.json": ns_quintic,
    "polar_express.json": polar_express_cases,
    "scale_factors.json": scale_factors,
    "momentum_conversion.json": momentum_conversion,
    "torch_muon.json": torch_muon,
    "muonium_muon.json": muonium_muon,
    "muonium_normuon.json": muonium_normuon,
    "neuralops_qkan_adamw.json": neuralops_qkan_adamw,
}
