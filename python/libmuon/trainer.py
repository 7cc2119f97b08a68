"""Muon in trainers that build their optimizer themselves."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn

from libmuon.groups import Rule, group_parameters
from libmuon.optimizer import Muon


class MuonFactory:
    """Builds `Muon` from a whole model, for trainers that ask for a factory.

    The Trainer of transformers calls it with the model: ``Trainer(...,
    optimizer_cls_and_kwargs=(libmuon.MuonFactory, {"lr": 3e-4}))``. Where it takes only an
    optimizer class, the model goes into the keywords: ``(libmuon.Muon, {"model": model})``.
    """

    def __call__(
        self, opt_model: nn.Module, *, rules: Iterable[Rule] | None = None, **options: Any
    ) -> Muon:
        """The optimizer of a model.

        Args:
            opt_model: the model; `group_parameters` divides it between Muon and AdamW.
            rules: `group_parameters`' rules.
            **options: `Muon`'s options.
        """
        if rules is None:
            return Muon(opt_model, **options)
        return Muon(group_parameters(opt_model, rules), **options)
