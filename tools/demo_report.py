"""What the demo found: a summary, a table and a picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
from demo_runs import Run
from matplotlib.axes import Axes

# Bounds on |C++ loss - Python loss|: rounding over the first steps, drift afterwards.
EARLY_STEPS = 50
EARLY_BOUND = 1e-6
BOUND = 1e-3

COLORS = {"adamw": "#b5651d", "muon": "#1f5fbf"}
LABELS = {"adamw": "AdamW, tuned", "muon": "Muon + AdamW"}


def first_at(run: Run, loss: float) -> dict[str, Any] | None:
    """The first validation of `run` that is not above `loss`."""
    return next((v for v in run.validations if v["validation_loss"] <= loss), None)


def largest_difference(a: Run, b: Run, steps: int | None = None) -> float:
    """Largest |difference| of the two runs' losses, over the first `steps` or over all."""
    differences = []
    for (kind, step, loss), other in zip(a.losses(), b.losses(), strict=True):
        if (kind, step) != other[:2]:
            raise ValueError(f"{a.name} logged {kind} {step} where {b.name} logged {other[:2]}")
        if steps is None or step <= steps:
            differences.append(abs(loss - other[2]))
    return max(differences)


def summarize(adamw: Run, muon: Run, python: Run) -> dict[str, Any]:
    """What summary.json holds."""
    target = adamw.end["validation_loss"]
    optimizers = {}
    for name, run in (("adamw", adamw), ("muon", muon)):
        reached = first_at(run, target)
        optimizers[name] = {
            "lr": run.settings["lr"],
            "final_validation_loss": run.end["validation_loss"],
            "seconds": run.end["seconds"],
            "steps_to_adamw_final": reached["step"] if reached else None,
            "seconds_to_adamw_final": reached["seconds"] if reached else None,
            "optimizer_share": run.end["optimizer_seconds"] / run.end["seconds"],
        }
    return {
        "settings": {
            name: value
            for name, value in muon.settings.items()
            if name not in ("run", "event", "optimizer", "lr")
        },
        "optimizers": optimizers,
        "cpp_python_difference": {
            "first_50_steps": largest_difference(muon, python, EARLY_STEPS),
            "all_steps": largest_difference(muon, python),
            "same_weights": muon.end["weights"] == python.end["weights"],
        },
    }


def failures(summary: dict[str, Any]) -> list[str]:
    """What is not as it should be; nothing in a good run."""
    adamw, muon = summary["optimizers"]["adamw"], summary["optimizers"]["muon"]
    difference = summary["cpp_python_difference"]
    found = []
    if not muon["final_validation_loss"] < adamw["final_validation_loss"]:
        found.append("Muon's final validation loss is not below AdamW's")
    if difference["first_50_steps"] > EARLY_BOUND:
        found.append(f"C++ and Python differ by {difference['first_50_steps']:.1e} in 50 steps")
    if difference["all_steps"] > BOUND:
        found.append(f"C++ and Python differ by {difference['all_steps']:.1e}")
    return found


def table(summary: dict[str, Any]) -> str:
    """The short table that ends the demo."""

    def reached(optimizer: dict[str, Any], key: str, digits: int) -> str:
        value = optimizer[f"{key}_to_adamw_final"]
        return "not reached" if value is None else f"{value:.{digits}f}"

    columns = [summary["optimizers"][name] for name in ("adamw", "muon")]
    rows = [
        ("", [LABELS["adamw"], LABELS["muon"]]),
        ("learning rate", [f"{c['lr']:g}" for c in columns]),
        ("final validation loss", [f"{c['final_validation_loss']:.4f}" for c in columns]),
        ("steps to AdamW's final loss", [reached(c, "steps", 0) for c in columns]),
        ("seconds to AdamW's final loss", [reached(c, "seconds", 1) for c in columns]),
        ("seconds of training", [f"{c['seconds']:.1f}" for c in columns]),
        ("optimizer's share of a step", [f"{c['optimizer_share']:.1%}" for c in columns]),
    ]
    lines = [f"{label:<32}" + "".join(f"{cell:>14}" for cell in cells) for label, cells in rows]
    difference = summary["cpp_python_difference"]
    lines.append(
        f"largest C++/Python difference of a loss: {difference['first_50_steps']:.1e} in the first "
        f"{EARLY_STEPS} steps, {difference['all_steps']:.1e} in all"
    )
    return "\n".join(lines)


def _curve(axes: Axes, run: Run, x: str) -> None:
    name = run.settings["optimizer"]
    points = run.validations
    axes.plot(
        [p[x] for p in points],
        [p["validation_loss"] for p in points],
        color=COLORS[name],
        linewidth=2,
        label=f"{LABELS[name]} (lr {run.settings['lr']:g}): {run.end['validation_loss']:.3f}",
    )


def _mark_reached(axes: Axes, adamw: Run, muon: Run, x: str, unit: str) -> None:
    """Draws AdamW's final loss and where Muon gets there."""
    target = adamw.end["validation_loss"]
    axes.axhline(target, color=COLORS["adamw"], linewidth=1, linestyle=(0, (4, 3)))
    reached = first_at(muon, target)
    if reached is None:
        return
    at = (reached[x], reached["validation_loss"])
    share = reached[x] / adamw.validations[-1][x]
    axes.plot(*at, "o", color=COLORS["muon"], markersize=7)
    axes.annotate(
        f"AdamW's final loss\nafter {reached[x]:.0f} {unit}\n({share:.0%} of AdamW's)",
        at,
        xytext=(0.03, 0.05),  # below falling curves there is always room
        textcoords="axes fraction",
        color=COLORS["muon"],
        arrowprops={"arrowstyle": "-", "color": COLORS["muon"], "relpos": (0.6, 1.0)},
    )


def draw(adamw: Run, muon: Run, path: Path) -> None:
    """Validation loss of both optimizers, over steps and over seconds."""
    figure, panels = plt.subplots(1, 2, figsize=(11, 4.6), sharey=True, layout="constrained")
    for axes, x, unit in zip(panels, ("step", "seconds"), ("steps", "seconds"), strict=True):
        for run in (adamw, muon):
            _curve(axes, run, x)
        _mark_reached(axes, adamw, muon, x, unit)
        axes.set_xlabel("step" if x == "step" else "seconds of training, 2 threads")
        axes.set_xlim(left=0)
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    lowest = min(v["validation_loss"] for run in (adamw, muon) for v in run.validations)
    panels[0].set_ylim(lowest - 0.1, 3.6)
    panels[0].set_ylabel("validation loss, nats per character")
    panels[0].legend(frameon=False, loc="upper right")
    settings = muon.settings
    figure.suptitle(
        f"A {settings['layers']}-layer GPT on the Python standard library's sources, "
        f"same weights and batches (seed {settings['seed']})"
    )
    figure.savefig(path, dpi=150)
    plt.close(figure)
