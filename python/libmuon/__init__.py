"""The Muon optimizer family: C++ on LibTorch, used as any torch optimizer."""

import torch as _torch

from libmuon import _C as _C  # registers torch.ops.muon
from libmuon._build import cmake_prefix_path
from libmuon.algorithms import Algorithm, Groups, register_algorithm, registered_algorithms
from libmuon.clip import qk_clip_
from libmuon.functional import orthogonalize, schedules, step_
from libmuon.groups import group_parameters
from libmuon.optimizer import Muon
from libmuon.state_file import load_state, save_state
from libmuon.trainer import MuonFactory

__version__: str = _torch.ops.muon.version()

__all__ = [
    "Algorithm",
    "Groups",
    "Muon",
    "MuonFactory",
    "__version__",
    "cmake_prefix_path",
    "group_parameters",
    "load_state",
    "orthogonalize",
    "qk_clip_",
    "register_algorithm",
    "registered_algorithms",
    "save_state",
    "schedules",
    "step_",
]
