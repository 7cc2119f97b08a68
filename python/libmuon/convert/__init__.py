"""State dicts of other optimizers as those of `libmuon.Muon` or ``torch.optim.Muon``.

``python -m libmuon convert`` is the same for files.
"""

from __future__ import annotations

from libmuon.convert.build import build_optimizer
from libmuon.convert.conversion import convert_state_dict
from libmuon.convert.detect import candidates
from libmuon.convert.model import ConversionError, Entry, Report
from libmuon.convert.sources import SOURCES

__all__ = [
    "SOURCES",
    "ConversionError",
    "Entry",
    "Report",
    "build_optimizer",
    "candidates",
    "convert_state_dict",
]
