"""Names of parameters, as the module tree of the user's model spells them.

An optimizer holds bare tensors. The modules that own them are found among those that were seen while they
were built, or else by one scan of the garbage collector's objects.
"""

from __future__ import annotations

import functools
import gc
import weakref
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from gtrace.host.sharded import flat_parts

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    import torch
    from torch.utils.hooks import RemovableHandle

#: Wrappers whose own level says nothing about the model: class name -> the attributes that hold the model.
_WRAPPERS = {
    "DistributedDataParallel": ("module",),
    "DataParallel": ("module",),
    "AveragedModel": ("module",),
    "DeepSpeedEngine": ("module",),
    "FullyShardedDataParallel": ("_fsdp_wrapped_module",),
    "CheckpointWrapper": ("_checkpoint_wrapped_module",),
    "OptimizedModule": ("_orig_mod",),
    "_FabricModule": ("_forward_module", "_original_module"),
}
#: What torch makes the first base of the classes that it derives from a model's.
_MIXINS = frozenset({"FSDPModule", "ReplicateModule", "DDP"})


def wrapped_by(module: nn.Module) -> tuple[str, ...]:
    """The attributes under which a wrapper holds the model; none for a module that is no wrapper."""
    return _WRAPPERS.get(type(module).__name__, ())


def unwrapped(module: nn.Module) -> nn.Module:
    """The model inside of wrappers, or the module itself."""
    inner = [module._modules[name] for name in wrapped_by(module) if module._modules.get(name) is not None]
    return module if not inner or inner[0] is None else unwrapped(inner[0])


@dataclass(frozen=True, slots=True)
class ParameterName:
    """What a parameter is called.

    Attributes:
        name: its first path through the module tree, such as ``encoder.layers.0.weight``.
        aliases: its other paths, where a module or a parameter is shared.
        module_type: class of the module that owns it, such as ``Conv2d``; empty where none does.
        model: class of the model's outermost module that is no wrapper; empty where there is none.
        part: attributes that say which part of it this process holds, where FullyShardedDataParallel cuts it.
    """

    name: str
    aliases: tuple[str, ...] = ()
    module_type: str = ""
    model: str = ""
    part: Mapping[str, Any] = field(default_factory=dict, compare=False)


@dataclass(slots=True)
class _Place:
    paths: list[str] = field(default_factory=list)
    module_type: str = ""


def class_name(module: nn.Module) -> str:
    """The class of a module as the user's code calls it."""
    kind = type(module)
    # fully_shard and replicate put a subclass in the class's place: FSDPLinear for Linear.
    if kind.__bases__[0].__name__ in _MIXINS and len(kind.__bases__) == 2:
        kind = kind.__bases__[1]
    return kind.__name__


class ModuleCollector:
    """Remembers, by weak reference, every module that registers a child or a parameter, is copied or unpickled."""

    def __init__(self) -> None:
        # By id and not in a WeakSet: a user's module may define __eq__ and be unhashable.
        self._modules: dict[int, weakref.ref[nn.Module]] = {}
        self._handles: list[RemovableHandle] = []
        self._original: Any = None
        self._ours: Any = None

    def install(self) -> None:
        """Start to collect."""
        self._original = nn.Module.__setstate__
        nn.Module.__setstate__ = self._watch_setstate(self._original)  # type: ignore[method-assign]
        self._ours = nn.Module.__setstate__
        self._handles = [
            register_module_module_registration_hook(self._saw),
            register_module_parameter_registration_hook(self._saw),
        ]

    def remove(self) -> None:
        """Stop; what was collected is kept."""
        for handle in self._handles:
            handle.remove()
        if nn.Module.__setstate__ is self._ours:
            nn.Module.__setstate__ = self._original  # type: ignore[method-assign]
        self._handles = []

    def modules(self) -> list[nn.Module]:
        """The collected modules that are still alive, in the order in which they were first seen."""
        alive = (reference() for reference in list(self._modules.values()))
        return [module for module in alive if module is not None]

    def _watch_setstate(self, original: Any) -> Any:
        # copy.deepcopy and pickle make a module without __init__, and put all that it holds into it at once.
        @functools.wraps(original)
        def __setstate__(module: nn.Module, state: Any) -> None:  # noqa: N807
            original(module, state)
            self._saw(module, "", None)

        return __setstate__

    def _saw(self, module: nn.Module, _name: str, _member: Any) -> None:
        key = id(module)
        if key not in self._modules:
            self._modules[key] = weakref.ref(module, lambda _: self._modules.pop(key, None))


def name_parameters(
    groups: Sequence[Mapping[str, Any]], modules: Iterable[nn.Module], *, stream: int = 0, scan: bool = True
) -> dict[int, ParameterName]:
    """Name every parameter of an optimizer.

    Args:
        groups: the optimizer's ``param_groups``.
        modules: where to look for owners; those that sit inside others are found through them.
        stream: number of the optimizer, for the names of parameters that no module owns.
        scan: look through all live objects where ``modules`` do not own every parameter.

    Returns:
        ``id(parameter)`` -> its name. Names are unique. Where several models share the optimizer, each name
        starts with its model's class, numbered where it repeats: ``Encoder.``, ``Encoder_2.``.
    """
    wanted = {id(parameter) for group in groups for parameter in group["params"]}
    models = _owners(wanted, list(modules))
    if scan and wanted - {key for _, places in models for key in places}:
        models = _owners(wanted, _all_live_modules())
    names: dict[int, ParameterName] = {}
    for (label, places), (root, _) in zip(_labelled(models), models, strict=True):
        parts = flat_parts(root)
        for key, place in places.items():
            first, *others = (label + path for path in place.paths)
            model = class_name(unwrapped(root))
            names[key] = ParameterName(first, tuple(others), place.module_type, model, parts.get(key, {}))
    _name_the_rest(names, groups, stream)
    return names


def _owners(wanted: set[int], modules: list[nn.Module]) -> list[tuple[nn.Module, dict[int, _Place]]]:
    """The outermost modules that own wanted parameters, those with most first, each with what it adds."""
    inner = {id(child) for module in modules for child in module._modules.values() if child is not None}
    found = []
    for module in modules:
        if id(module) not in inner:
            places = {key: place for key, place in _places(module).items() if key in wanted}
            if places:
                found.append((module, places))
    found.sort(key=lambda item: -len(item[1]))
    taken: set[int] = set()
    owners = []
    for module, places in found:
        new = {key: place for key, place in places.items() if key not in taken}
        if new:
            owners.append((module, new))
            taken |= new.keys()
    return owners


def _places(root: nn.Module) -> dict[int, _Place]:
    places: dict[int, _Place] = {}
    for path, module, parameter in _walk(root, "", set()):
        place = places.setdefault(id(parameter), _Place(module_type=class_name(module)))
        if path not in place.paths:
            place.paths.append(path)
    return places


def _walk(module: nn.Module, prefix: str, above: set[int]) -> Iterator[tuple[str, nn.Module, torch.nn.Parameter]]:
    for name, parameter in module._parameters.items():
        if parameter is not None:
            yield prefix + name, module, parameter
    wrapped = wrapped_by(module)
    for name, child in module._modules.items():
        if child is None or id(child) in above:
            continue
        below = prefix if name in wrapped else f"{prefix}{name}."
        yield from _walk(child, below, above | {id(module)})


def _labelled(
    models: list[tuple[nn.Module, dict[int, _Place]]],
) -> Iterator[tuple[str, dict[int, _Place]]]:
    seen: dict[str, int] = {}
    for module, places in models:
        kind = class_name(unwrapped(module))
        seen[kind] = seen.get(kind, 0) + 1
        if len(models) == 1:
            yield "", places
        else:
            yield f"{kind}." if seen[kind] == 1 else f"{kind}_{seen[kind]}.", places


def _all_live_modules() -> list[nn.Module]:
    # type() and not isinstance(): some objects compute their __class__, and warn or raise when asked.
    # A module whose __init__ has not run yet has no tables.
    modules = (thing for thing in gc.get_objects() if issubclass(type(thing), nn.Module))
    return [module for module in modules if "_parameters" in vars(module) and "_modules" in vars(module)]


def _name_the_rest(names: dict[int, ParameterName], groups: Sequence[Mapping[str, Any]], stream: int) -> None:
    taken = {entry.name for entry in names.values()}
    for number, group in enumerate(groups):
        given = group.get("param_names") or ()
        for place, parameter in enumerate(group["params"]):
            if id(parameter) in names:
                continue
            name = str(given[place]) if place < len(given) else ""
            if not name or name in taken:
                name = f"unnamed/opt{stream}.g{number}.p{place}"
            names[id(parameter)] = ParameterName(name)
            taken.add(name)
