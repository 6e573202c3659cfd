"""Run a function when a module has been imported, without importing it."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable, Sequence
from types import ModuleType

__all__ = ["after_import"]

Action = Callable[[ModuleType], None]


def after_import(name: str, action: Action) -> None:
    """Call `action(module)` once, now if the module is loaded, else right after its import."""
    module = sys.modules.get(name)
    if module is not None and not getattr(getattr(module, "__spec__", None), "_initializing", False):
        action(module)
        return
    finder = next((f for f in sys.meta_path if isinstance(f, _Finder)), None)
    if finder is None:
        finder = _Finder()
        sys.meta_path.insert(0, finder)
    finder.actions.setdefault(name, []).append(action)


class _Finder(importlib.abc.MetaPathFinder):
    """Lets the other finders find a watched module, and wraps its loader."""

    def __init__(self) -> None:
        self.actions: dict[str, list[Action]] = {}
        self._searching: set[str] = set()

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """The spec that the other finders give, with a loader that runs the actions."""
        if fullname not in self.actions or fullname in self._searching:
            return None
        self._searching.add(fullname)
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._searching.discard(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, self.actions)
        return spec


class _Loader(importlib.abc.Loader):
    """Runs the module as its own loader does, then the actions."""

    def __init__(self, loader: importlib.abc.Loader, actions: dict[str, list[Action]]) -> None:
        self._loader, self._actions = loader, actions

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        """As the module's own loader does."""
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        """Run the module, give it its own loader back, run the actions: once, and only if the import succeeds."""
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        for action in self._actions.pop(module.__name__, []):
            action(module)
