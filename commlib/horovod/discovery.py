"""Finds tables without being given the model: by whose module looks a parameter up."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook


class Discovery:
    """Watches every module's forward for a while; close it soon, it slows all modules a little.

    Args:
        names: Name of a parameter by its `id`.

    Attributes:
        modules: Embedding modules that were called, by their weight's name.
        shared: Names of parameters that other modules use as well: their gradients are dense.

    Source: ours.
    """

    def __init__(self, names: Mapping[int, str]) -> None:
        self._names = names
        self.modules: dict[str, list[nn.Module]] = {}
        self.shared: set[str] = set()
        self._handle = register_module_forward_hook(self._called)

    def close(self) -> None:
        """Stop watching."""
        self._handle.remove()

    def tables(self) -> set[str]:
        """Parameters that only embedding modules use."""
        return set(self.modules) - self.shared

    def _called(self, module: nn.Module, inputs: object, output: object) -> None:
        if not torch.is_grad_enabled():
            return
        for parameter in module._parameters.values():
            name = self._names.get(id(parameter))
            if name is None:
                continue
            if not isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
                self.shared.add(name)
            elif module not in self.modules.setdefault(name, []):
                self.modules[name].append(module)
