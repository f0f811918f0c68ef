"""Names of parameters and modules, as the module tree of the user's model spells them, and which part is held here.

An optimizer holds bare tensors, and a forward pass runs bare modules. The modules that own them are found among those
that were seen while they were built, or else by one scan of the garbage collector's objects.
"""

from __future__ import annotations

import functools
import gc
import itertools
import sys
import weakref
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

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
    parameter: torch.Tensor
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


class _Model(NamedTuple):
    """A model that has names: what tells it from others, what its names start with, and who trained it last."""

    reference: weakref.ref[nn.Module]
    label: str
    prefix: str
    stream: int


class _Holder(NamedTuple):
    """Who has a name: the model in which it is a path, None for none, and the parameter that was there last."""

    model: weakref.ref[nn.Module] | None
    parameter: weakref.ref[torch.Tensor]
    stream: int


class Names:
    """Names the parameters of every optimizer of a process, and keeps what it says.

    A model on its own goes without a name in front, and so does one that is split over several optimizers. Where a
    name would be that of another parameter, already named for another optimizer, all names of the later model start
    with its class: ``Discriminator.``, numbered where there is an earlier model of that class: ``Sequential_2.``.
    """

    def __init__(self) -> None:
        self._models: dict[int, _Model] = {}
        self._labels: dict[str, _Model] = {}
        self._taken: dict[str, _Holder] = {}

    def of(
        self, groups: Sequence[Mapping[str, Any]], modules: Iterable[nn.Module], *, stream: int = 0, scan: bool = True
    ) -> dict[int, ParameterName]:
        """Name every parameter of an optimizer.

        Args:
            groups: the optimizer's ``param_groups``.
            modules: where to look for owners; those that sit inside others are found through them.
            stream: number of the optimizer, for the names of parameters that no module owns.
            scan: look through all live objects where ``modules`` do not own every parameter.

        Returns:
            ``id(parameter)`` -> its name. Names are unique, and other than those of other parameters of optimizers
            before. Where several models share the optimizer, each name starts with its model's class, numbered where
            it repeats: ``Encoder.``, ``Encoder_2.``.
        """
        wanted = {id(parameter) for group in groups for parameter in group["params"]}
        models = _owners(wanted, list(modules))
        if scan and wanted - {key for _, places in models for key in places}:
            models = _owners(wanted, _all_live_modules())
        names: dict[int, ParameterName] = {}
        for root, places in models:
            model = unwrapped(root)
            prefix = self._prefix(model, stream, alone=len(models) == 1)
            parts = flat_parts(root)
            for key, place in places.items():
                first, *others = (prefix + path for path in place.paths)
                names[key] = ParameterName(
                    first, tuple(others), place.module_type, class_name(model), parts.get(key, {})
                )
        self._name_the_rest(names, groups, stream)
        return names

    def reserve(self, model: nn.Module) -> None:
        """Take the names of a model before those of any optimizer come."""
        self._prefix(model, -1, alone=True)

    def _prefix(self, model: nn.Module, stream: int, *, alone: bool) -> str:
        """What the names of a model's parameters start with; its names are taken from now on."""
        reference = weakref.ref(model)
        paths = {place.paths[0]: place.parameter for place in _places(model).values()}
        label, prefix = next(
            choice
            for choice in self._choices(model, stream, alone)
            if not any(self._is_taken(choice[1] + path, paths[path], stream, model) for path in paths)
        )
        self._models[id(model)] = self._labels[label] = _Model(reference, label, prefix, stream)
        holders = {path: _Holder(reference, weakref.ref(paths[path]), stream) for path in paths}
        self._taken |= {prefix + path: holder for path, holder in holders.items()}
        return prefix

    def _choices(self, model: nn.Module, stream: int, alone: bool) -> Iterator[tuple[str, str]]:
        """Labels and prefixes that a model may have, the best first; there is always another one."""
        # The id of a model that is gone may be another's by now.
        known = self._models.get(id(model))
        if known is not None and known.reference() is model:
            yield known.label, known.prefix
        kind = class_name(model)
        for number in itertools.count(1):
            label = kind if number == 1 else f"{kind}_{number}"
            owner = self._labels.get(label)
            if owner is None or owner.reference() is model or (owner.reference() is None and owner.stream == stream):
                if alone:
                    yield label, ""
                yield label, f"{label}."

    def _is_taken(self, name: str, parameter: torch.Tensor, stream: int, model: nn.Module | None = None) -> bool:
        """Whether the name is another parameter's; one that took another's place in its model is no other."""
        holder = self._taken.get(name)
        if holder is None or holder.parameter() is parameter:
            return False
        home = None if holder.model is None else holder.model()
        if home is not None:
            return home is not model
        # An optimizer that goes on with a new model, or new tensors, goes on with the names. For another optimizer
        # it must not matter whether the model before is already gone.
        return holder.stream != stream

    def _name_the_rest(self, names: dict[int, ParameterName], groups: Sequence[Mapping[str, Any]], stream: int) -> None:
        """Name parameters that no module owns."""
        here = {entry.name for entry in names.values()}
        for number, group in enumerate(groups):
            given = group.get("param_names") or ()
            for place, parameter in enumerate(group["params"]):
                if id(parameter) in names:
                    continue
                name = str(given[place]) if place < len(given) else ""
                if not name or name in here or self._is_taken(name, parameter, stream):
                    name = f"unnamed/opt{stream}.g{number}.p{place}"
                names[id(parameter)] = ParameterName(name)
                here.add(name)
                self._taken[name] = _Holder(None, weakref.ref(parameter), stream)


def name_parameters(
    groups: Sequence[Mapping[str, Any]], modules: Iterable[nn.Module], *, stream: int = 0, scan: bool = True
) -> dict[int, ParameterName]:
    """Name every parameter of one optimizer, whatever others there are; see :meth:`Names.of`."""
    return Names().of(groups, modules, stream=stream, scan=scan)


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
    for level, module in _paths(root, "", set()):
        for name, parameter in module._parameters.items():
            if parameter is None:
                continue
            place = places.setdefault(id(parameter), _Place(parameter, module_type=class_name(module)))
            path = f"{level}.{name}" if level else name
            if path not in place.paths:
                place.paths.append(path)
    return places


def _all_live_modules() -> list[nn.Module]:
    # type() and not isinstance(): some objects compute their __class__, and warn or raise when asked.
    # A module whose __init__ has not run yet has no tables.
    modules = (thing for thing in gc.get_objects() if issubclass(type(thing), nn.Module))
    return [module for module in modules if "_parameters" in vars(module) and "_modules" in vars(module)]


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


def is_sharded(tensor: torch.Tensor) -> bool:
    """Whether this process holds it as a part of something larger."""
    # Not imported for this: a program that has made one has imported it.
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """What this process holds of a tensor; the tensor itself where that is all of it."""
    part: torch.Tensor = tensor.to_local() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]
    return part


def sharding(parameter: Any) -> dict[str, Any]:
    """Attributes that say which part of a parameter this process holds; none where it holds all of it.

    Returns:
        ``placements``, one per dimension of the mesh (such as ``Shard(dim=0)``), ``mesh`` (its shape), ``place``
        (this process's coordinates in it) and ``whole_shape``.
    """
    if not is_sharded(parameter):
        return {}
    place = parameter.device_mesh.get_coordinate()
    return {
        "placements": [repr(placement) for placement in parameter.placements],
        "mesh": list(parameter.device_mesh.shape),
        "place": None if place is None else list(place),
        "whole_shape": list(parameter.shape),
    }


def flat_parts(model: nn.Module) -> dict[int, dict[str, Any]]:
    """Which parts of its parameters this process holds where ``FullyShardedDataParallel`` wraps (a part of) a model.

    Returns:
        ``id(parameter)`` -> attributes as of :func:`sharding`, with the placement ``FlatShard`` and ``elements``, the
        first element of the whole (flat, in C order) that is held and the one after the last. That is after a forward
        pass; before, there are no such parts.
    """
    out = {}
    for module in model.modules():
        # By name: importing the class would cost every other program time.
        handle = getattr(module, "_handle", None) if type(module).__name__ == "FullyShardedDataParallel" else None
        if handle is None or not handle.uses_sharded_strategy:
            continue
        about = {"placements": ["FlatShard"], "mesh": [handle.world_size], "place": [handle.rank]}
        flat = handle.flat_param
        start = handle.rank * flat.numel()
        out[id(flat)] = about | {
            "whole_shape": list(flat._unpadded_unsharded_size),
            "elements": [start, start + flat.numel()],
        }
        infos = flat._shard_param_infos if flat._params is not None else ()
        for parameter, shape, info in zip(flat._params or (), flat._shapes, infos, strict=False):
            if info.in_shard:
                elements = [info.intra_param_start_idx, info.intra_param_end_idx + 1]
                out[id(parameter)] = about | {"whole_shape": list(shape), "elements": elements}
    return out
