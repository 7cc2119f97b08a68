"""The optimizers whose state dicts can be read, one module each."""

from __future__ import annotations

from libmuon.convert.model import Source
from libmuon.convert.sources import (
    dion,
    keller,
    moonlight,
    muonium,
    native,
    neuralops,
    normuon,
    pytorch_optimizer,
    qkan,
    timm,
    torch_adam,
    torch_muon,
)

SOURCES: dict[str, Source] = {
    source.name: source
    for source in (
        native.SOURCE,
        torch_muon.SOURCE,
        torch_adam.ADAMW,
        torch_adam.ADAM,
        keller.SOURCE,
        normuon.SOURCE,
        moonlight.SOURCE,
        dion.SOURCE,
        timm.SOURCE,
        pytorch_optimizer.SOURCE,
        muonium.SOURCE,
        neuralops.SOURCE,
        qkan.SOURCE,
    )
}
