"""Names of modules: their paths in the module trees of a process, found while a forward pass runs."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, NamedTuple

from gtrace.torch_hooks.naming import _all_live_modules, class_name, unwrapped, wrapped_by

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import nn

#: Searches of the whole process, and walks in vain for one class of loose modules, before it is given up.
_MOST_SCANS = 4
_MOST_WALKS = 3


class ModuleName(NamedTuple):
    """What a module is called.

    Attributes:
        path: its first path in its module tree, such as ``encoder.layers.0``.
        module_type: its class, such as ``Conv2d``.
        aliases: its other paths, where it is shared.
    """

    path: str
    module_type: str
    aliases: tuple[str, ...] = ()


class ModulePaths:
    """Gives each module a name that it keeps.

    A module of the first model that is trained is called by its path. In further ones the path starts with the
    model's class, numbered where it repeats: ``Encoder_2.``. A model itself is called by its class. Loose
    modules without parameters, such as a ``nn.ReLU()`` made in a forward pass, share the name
    ``unnamed/ReLU``.

    Args:
        models: the modules to look in; those that sit inside others are found through them.
        scan: search the whole process for trees where these do not hold a module with parameters.
        closed: modules outside of ``models`` have no name.
    """

    def __init__(self, models: Callable[[], Sequence[nn.Module]], *, scan: bool, closed: bool = False) -> None:
        self._models = models
        self._scans = _MOST_SCANS if scan else 0
        self._closed = closed
        self._names: dict[int, tuple[weakref.ref[nn.Module], ModuleName | None]] = {}
        self._labels: dict[str, weakref.ref[nn.Module]] = {}
        self._first: weakref.ref[nn.Module] | None = None
        self._vain: dict[type, int] = {}

    @property
    def first(self) -> nn.Module | None:
        """The first model that is trained, None where there is none yet or it is gone."""
        return self._first() if self._first is not None else None

    def of(self, module: nn.Module) -> ModuleName | None:
        """The module's name; None for one that is not to be named."""
        # The id of a module that is gone may be another's by now.
        entry = self._names.get(id(module))
        if entry is None or entry[0]() is not module:
            entry = self._find(module)
        return entry[1]

    def _find(self, module: nn.Module) -> tuple[weakref.ref[nn.Module], ModuleName | None]:
        loose = not module._modules and not any(p is not None for p in module._parameters.values())
        kind = type(module)
        if self._vain.get(kind, 0) < _MOST_WALKS:
            root = _root_of(module, list(self._models()))
            if root is None and not loose and self._scans:
                self._scans -= 1
                root = _root_of(module, _all_live_modules())
            if root is not None:
                self._name_all(root)
                return self._names[id(module)]
            if loose:
                self._vain[kind] = self._vain.get(kind, 0) + 1
        shared = ModuleName(f"unnamed/{kind.__name__}", kind.__name__)
        entry = weakref.ref(module), None if self._closed else shared
        self._names[id(module)] = entry
        return entry

    def _knows(self, module: nn.Module) -> bool:
        entry = self._names.get(id(module))
        return entry is not None and entry[0]() is module

    def _name_all(self, root: nn.Module) -> None:
        """Name the modules of a tree that have no name yet."""
        found: dict[int, tuple[nn.Module, list[str]]] = {}
        for path, module in _paths(root, "", set()):
            paths = found.setdefault(id(module), (module, []))[1]
            if path not in paths:
                paths.append(path)
        bare = unwrapped(root)
        prefix, own = self._label(bare)
        for module, paths in found.values():
            if not self._knows(module):
                first, *others = [f"{prefix}{path}" if path else own for path in paths]
                self._names[id(module)] = weakref.ref(module), ModuleName(first, class_name(module), tuple(others))

    def _label(self, root: nn.Module) -> tuple[str, str]:
        """What the paths of a tree start with, nothing for the first one that is trained; what its root is called."""
        kind = class_name(root)
        label, number = kind, 2
        while label in self._labels and self._labels[label]() not in (None, root):
            label, number = f"{kind}_{number}", number + 1
        self._labels[label] = weakref.ref(root)
        first = self.first
        if first is None and any(parameter.requires_grad for parameter in root.parameters()):
            self._first = weakref.ref(root)
            first = root
        return ("" if first is root else f"{label}."), label


def _root_of(module: nn.Module, modules: list[nn.Module]) -> nn.Module | None:
    """The outermost module above a module, or itself where it has parameters or modules below."""
    inner = {id(child) for one in modules for child in one._modules.values() if child is not None}
    for root in modules:
        # A loose module is no model.
        model = id(root) not in inner and (root._modules or any(True for _ in root.parameters()))
        if model and any(one is module for one in root.modules()):
            return root
    return None


def _paths(module: nn.Module, path: str, above: set[int]) -> Iterator[tuple[str, nn.Module]]:
    """Every module of a tree under each of its paths, without the levels of wrappers."""
    yield path, module
    wrapped = wrapped_by(module)
    for name, child in module._modules.items():
        if child is not None and id(child) not in above:
            below = path if name in wrapped else f"{path}.{name}" if path else name
            yield from _paths(child, below, above | {id(module)})
