"""muonium's optimizer and research base, as presets over libmuon.

``from libmuon.compat.muonium import Muon`` in place of ``from muonium import Muon`` trains the same
run on any device. Names, defaults and results are those of muonium 0.2.0, with these corrections:

- Decay shrinks by ``lr * wd``; muonium multiplies by the shape factor too: ``decay_lr="adjusted"``.
- Gradients and the caller's group dicts are never written.
- A misspelt option is an error; ``weight_decay`` means ``wd``; keys of a group that resemble no
  option are kept as metadata.
- Groups that are added later are groups as all others.
- The blocks of ``split_sizes`` get what parameters of their own would get, decay and NorMuon's
  statistics included.
- Tensors of four or more dims need ``flatten=True`` or another choice of the caller's.
- ``is_adamw`` changes nothing: a group is coupled if it says ``algorithm="adam"``.
- Orthogonalisation is float32 on a CPU; ``compute_dtype`` chooses.

A group in `Muon.param_groups` has libmuon's names: ``weight_decay``, ``cautious``,
``ns_coefficients``.
"""

from libmuon.compat.muonium.algorithms import (
    BufferSpec,
    MuonAlgorithm,
    get_algorithm,
    register_muon_algorithm,
    registered_algorithms,
)
from libmuon.compat.muonium.optim import Muon
from libmuon.compat.muonium.orthogonalize import (
    OrthogonalizationStrategy,
    foreach_zeropower,
    gram,
    gram_,
    orthogonalize_batch,
    orthogonalize_single,
    split_lr_scales,
    zeropower,
)

__all__ = [
    "BufferSpec",
    "Muon",
    "MuonAlgorithm",
    "OrthogonalizationStrategy",
    "foreach_zeropower",
    "get_algorithm",
    "gram",
    "gram_",
    "orthogonalize_batch",
    "orthogonalize_single",
    "register_muon_algorithm",
    "registered_algorithms",
    "split_lr_scales",
    "zeropower",
]
