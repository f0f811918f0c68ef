"""Names of parameters and modules from the module tree of the user's model, and the part that is held here.

An optimizer holds bare tensors, and a forward pass runs bare modules. Their owners are found among the modules
that were seen while they were built, or else by one scan of the garbage collector's objects.
"""

from __future__ import annotations

import functools
import itertools
import sys
import weakref
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.utils.weak import WeakIdKeyDictionary

from gtrace.torch_hooks.steps import OfTensors, Patch, hides_from_swaps, living, parameters_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    import torch
    from torch.utils.hooks import RemovableHandle


#: wrappers that do not appear in names: class name -> the attributes that hold the model
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
#: the first base of the classes that torch derives from a model's class
_MIXINS = frozenset({"FSDPModule", "ReplicateModule", "DDP"})


def wrapped_by(module: nn.Module) -> tuple[str, ...]:
    """The attributes that hold the wrapped model; empty for a module that is not a wrapper."""
    return _WRAPPERS.get(class_name(module), ())


def unwrapped(module: nn.Module) -> nn.Module:
    """The model inside wrappers, or the module itself."""
    inner = [module._modules[name] for name in wrapped_by(module) if module._modules.get(name) is not None]
    return module if not inner or inner[0] is None else unwrapped(inner[0])


@dataclass(frozen=True, slots=True)
class TreeName:
    """The name of a parameter or a module.

    Attributes:
        name: its first path through the module tree, such as ``encoder.layers.0.weight``.
        aliases: its other paths, if it or a module above it is shared.
        module_type: class of the module, or of the one that owns the parameter, such as ``Conv2d``; empty without.
        model: of a parameter, class of the outermost module other than wrappers; empty without a model.
        part: attributes about the part that this process holds, if FullyShardedDataParallel cuts it.
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
    """The class of a module, as in the user's code."""
    kind = type(module)
    # fully_shard and replicate replace the class by a subclass: FSDPLinear for Linear.
    if kind.__bases__[0].__name__ in _MIXINS and len(kind.__bases__) == 2:
        kind = kind.__bases__[1]
    return kind.__name__


class ModuleCollector:
    """Remembers, by weak reference, every module that registers a child or a parameter, is copied or unpickled."""

    def __init__(self) -> None:
        # By identity and not in a WeakSet: a user's module may define __eq__ and be unhashable.
        self._modules: Any = WeakIdKeyDictionary()
        self._handles: list[RemovableHandle] = []
        original = nn.Module.__setstate__
        self._patch = Patch(nn.Module, "__setstate__", original, self._watch_setstate(original))

    def install(self) -> None:
        """Start collecting."""
        self._patch.use(True)
        self._handles = [
            register_module_module_registration_hook(self._saw),
            register_module_parameter_registration_hook(self._saw),
        ]

    def remove(self) -> None:
        """Stop collecting; the modules so far are kept."""
        for handle in self._handles:
            handle.remove()
        self._patch.use(False)

    def adopt(self, earlier: ModuleCollector) -> None:
        """Know the modules that another collector has seen."""
        for module in earlier.modules():
            self._saw(module, "", None)

    def modules(self) -> list[nn.Module]:
        """The collected modules that are still alive, in the order in which they were first seen."""
        alive = (reference() for reference in self._modules.keyrefs())
        return [module for module in alive if module is not None]

    def _watch_setstate(self, original: Any) -> Any:
        # copy.deepcopy and pickle make a module without __init__, and set its whole content at once.
        @functools.wraps(original)
        def __setstate__(module: nn.Module, state: Any) -> None:  # noqa: N807
            original(module, state)
            self._saw(module, "", None)

        return __setstate__

    def _saw(self, module: nn.Module, _name: str, _member: Any) -> None:
        self._modules.setdefault(module, None)


class Names:
    """Names the parameters of every optimizer of a process, and keeps the names.

    A single model has no prefix, and neither has one that is split over several optimizers. If a
    name would clash with another parameter, already named for another optimizer, all names of the later model start
    with its class: ``Discriminator.``, numbered if there is an earlier model of that class: ``Sequential_2.``.
    """

    def __init__(self) -> None:
        #: model -> its label and the prefix of its names
        self._models: Any = WeakIdKeyDictionary()
        #: label -> its model, and the optimizer that trained it last
        self._labels: dict[str, tuple[weakref.ref[nn.Module], int]] = {}
        #: name -> the model in which it is a path (or None), the parameter that had it last, and its optimizer
        self._taken: dict[str, tuple[weakref.ref[nn.Module] | None, Callable[[], torch.Tensor | None], int]] = {}
        #: of the last optimizer for which all live objects were looked through: there may be one for each layer
        self._found: list[weakref.ref[nn.Module]] = []
        hides_from_swaps(self)

    def of(
        self, groups: Sequence[Mapping[str, Any]], modules: Iterable[nn.Module], *, stream: int = 0, scan: bool = True
    ) -> dict[int, TreeName]:
        """Name every parameter of an optimizer.

        Args:
            modules: modules that may own them; modules inside these are found through them.
            stream: number of the optimizer, for the names of parameters without an owner.
            scan: look through all live objects if ``modules`` do not own every parameter.

        Returns:
            ``id(parameter)`` -> its name. Names are unique, and differ from those of other parameters of earlier
            optimizers. If several models share the optimizer, each name starts with its model's class, numbered if
            it repeats: ``Encoder.``, ``Encoder_2.``.
        """
        wanted = set(map(id, parameters_of(groups)))
        models = _owners(wanted, [*modules, *(root for one in self._found if (root := one()) is not None)])
        if scan and wanted - {key for _, places in models for key in places}:
            models = _owners(wanted, _all_live_modules())
            self._found = [weakref.ref(root) for root, _ in models]
        names: dict[int, TreeName] = {}
        for root, places in models:
            model = unwrapped(root)
            prefix = self._prefix(model, stream, alone=len(models) == 1)
            parts = flat_parts(root)
            for key, place in places.items():
                first, *others = (prefix + path for path in place.paths)
                names[key] = TreeName(first, tuple(others), place.module_type, class_name(model), parts.get(key, {}))
        self._name_the_rest(names, groups, stream)
        return names

    def reserve(self, model: nn.Module) -> None:
        """Reserve the names of a model before any optimizer is named."""
        self._prefix(model, -1, alone=True)

    def forget(self, parameter: torch.Tensor) -> None:
        """Keep no reference to a parameter; its model keeps its names."""
        for name, (owner, last, stream) in self._taken.items():
            if last() is parameter:
                self._taken[name] = owner, lambda: None, stream

    def _prefix(self, model: nn.Module, stream: int, *, alone: bool) -> str:
        """The prefix of a model's parameter names; reserves its names."""
        reference = weakref.ref(model)
        paths = {place.paths[0]: place.parameter for place in _places(model).values()}
        label, prefix = next(
            choice
            for choice in self._choices(model, stream, alone)
            if not any(self._is_taken(choice[1] + path, paths[path], stream, model) for path in paths)
        )
        self._models[model] = label, prefix
        self._labels[label] = reference, stream
        self._taken |= {prefix + path: (reference, weakref.ref(one), stream) for path, one in paths.items()}
        return prefix

    def _choices(self, model: nn.Module, stream: int, alone: bool) -> Iterator[tuple[str, str]]:
        """Possible labels and prefixes of a model, the best first; there is always another one."""
        if model in self._models:
            yield self._models[model]
        kind = class_name(model)
        for number in itertools.count(1):
            label = kind if number == 1 else f"{kind}_{number}"
            owner, earlier = self._labels.get(label, (None, stream))
            if owner is None or owner() is model or (owner() is None and earlier == stream):
                if alone:
                    yield label, ""
                yield label, f"{label}."

    def _is_taken(self, name: str, parameter: torch.Tensor, stream: int, model: nn.Module | None = None) -> bool:
        """Whether the name belongs to another parameter; one that replaced another in its model does not count."""
        owner, last, earlier = self._taken.get(name, (None, None, stream))
        if last is None or last() is parameter:
            return False
        home = None if owner is None else owner()
        if home is not None:
            return home is not model
        # An optimizer that continues with a new model, or new tensors, keeps the names. For another optimizer
        # it must not matter whether the earlier model still exists.
        return earlier != stream

    def _name_the_rest(self, names: dict[int, TreeName], groups: Sequence[Mapping[str, Any]], stream: int) -> None:
        here = {entry.name for entry in names.values()}
        for number, group in enumerate(groups):
            given = group.get("param_names") or ()
            for place, parameter in enumerate(group["params"]):
                if id(parameter) in names:
                    continue
                name = str(given[place]) if place < len(given) else ""
                if not name or name in here or self._is_taken(name, parameter, stream):
                    name = f"unnamed/opt{stream}.g{number}.p{place}"
                names[id(parameter)] = TreeName(name)
                here.add(name)
                self._taken[name] = None, weakref.ref(parameter), stream


class KeptNames:
    """Names of parameters, which keep them as long as they exist; no two have the same one.

    A program may give a parameter another shape; then it is another one.
    """

    def __init__(self) -> None:
        self._names: OfTensors[tuple[str, torch.Size]] = OfTensors()
        self._namer, self._taken = Names(), set[str]()

    def __reduce__(self) -> tuple[type[KeptNames], tuple[()]]:
        # For pickle: tensors of another process have no names yet.
        return KeptNames, ()

    def __getitem__(self, parameter: torch.Tensor) -> str:
        return self._names[parameter][0]

    def __contains__(self, parameter: torch.Tensor) -> bool:
        return parameter in self._names and self._names[parameter][1] == parameter.shape

    def add(
        self,
        parameters: Iterable[torch.Tensor],
        groups: Sequence[Mapping[str, Any]],
        modules: Callable[[], Iterable[nn.Module]],
        *,
        stream: int = 0,
        scan: bool = True,
    ) -> list[torch.Tensor]:
        """Name those of an optimizer's parameters that have no name, and return them; see :meth:`Names.of`."""
        new = [parameter for parameter in parameters if parameter not in self]
        found = self._namer.of(groups, modules(), stream=stream, scan=scan) if new else {}
        for parameter in new:
            name = found[id(parameter)].name
            # A layer that took another's place in a model has its name.
            name = plain = f"opt{stream}/{name}" if name in self._taken else name
            again = 1
            while name in self._taken:
                again += 1
                name = f"{plain}#{again}"
            self._names[parameter] = name, parameter.shape
            self._taken.add(name)
        return new


def _owners(wanted: set[int], modules: list[nn.Module]) -> list[tuple[nn.Module, dict[int, _Place]]]:
    """The outermost modules that own wanted parameters, largest number first, each with the parameters it adds."""
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
    # A module whose __init__ has not run yet has no tables.
    return [one for one in living(nn.Module) if "_parameters" in vars(one) and "_modules" in vars(one)]


#: limits on searches of the whole process, and on failed walks for one class of loose modules
_MOST_SCANS = 4
_MOST_WALKS = 3


class ModulePaths:
    """Gives each module a name that it keeps.

    A module of the first trained model is named by its path. In later models the path starts with the
    model's class, numbered if it repeats: ``Encoder_2.``. A model itself is named by its class. Loose
    modules without parameters, such as a ``nn.ReLU()`` made in a forward pass, share the name
    ``unnamed/ReLU``.

    Args:
        models: the modules to look in; modules inside these are found through them.
        scan: search the whole process for trees if these do not hold a module with parameters.
        closed: modules outside ``models`` have no name.
    """

    def __init__(self, models: Callable[[], Sequence[nn.Module]], *, scan: bool, closed: bool = False) -> None:
        self._models = models
        self._scans = _MOST_SCANS if scan else 0
        self._closed = closed
        self._names: Any = WeakIdKeyDictionary()
        self._labels: dict[str, weakref.ref[nn.Module]] = {}
        self._first: weakref.ref[nn.Module] | None = None
        self._vain: dict[type, int] = {}

    @property
    def first(self) -> nn.Module | None:
        """The first trained model, None if there is none yet or it is gone."""
        return self._first() if self._first is not None else None

    def of(self, module: nn.Module) -> TreeName | None:
        """The module's name; None for one that gets no name."""
        if module not in self._names:
            self._find(module)
        return self._names[module]

    def _find(self, module: nn.Module) -> None:
        loose = not module._modules and not any(p is not None for p in module._parameters.values())
        kind = type(module)
        if self._vain.get(kind, 0) < _MOST_WALKS:
            root = _root_of(module, list(self._models()))
            if root is None and not loose and self._scans:
                self._scans -= 1
                root = _root_of(module, _all_live_modules())
            if root is not None:
                self._name_all(root)
                return
            if loose:
                self._vain[kind] = self._vain.get(kind, 0) + 1
        self._names[module] = None if self._closed else TreeName(f"unnamed/{kind.__name__}", (), kind.__name__)

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
            if module not in self._names:
                first, *others = [f"{prefix}{path}" if path else own for path in paths]
                self._names[module] = TreeName(first, tuple(others), class_name(module))

    def _label(self, root: nn.Module) -> tuple[str, str]:
        """The prefix of paths in a tree, empty for the first trained one; and the name of its root."""
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
    """The outermost module above a module, or itself if it has parameters or submodules."""
    inner = {id(child) for one in modules for child in one._modules.values() if child is not None}
    for root in modules:
        # A loose module is not a model.
        model = id(root) not in inner and (root._modules or any(True for _ in root.parameters()))
        if model and any(one is module for one in root.modules()):
            return root
    return None


def _paths(module: nn.Module, path: str, above: set[int]) -> Iterator[tuple[str, nn.Module]]:
    """Every module of a tree under each of its paths, without wrappers."""
    yield path, module
    wrapped = wrapped_by(module)
    for name, child in module._modules.items():
        if child is not None and id(child) not in above:
            below = path if name in wrapped else f"{path}.{name}" if path else name
            yield from _paths(child, below, above | {id(module)})


def is_sharded(tensor: torch.Tensor) -> bool:
    """Whether this process holds the tensor as a part of something larger."""
    # Do not import torch's class for this: a program that uses it has imported it.
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """This process's part of a tensor; the tensor itself if it is not sharded."""
    part: torch.Tensor = tensor.to_local() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]
    return part


def sharding(parameter: Any) -> dict[str, Any]:
    """Attributes about the part of a parameter that this process holds; empty if it holds all of it.

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
    """The parts of its parameters that this process holds if ``FullyShardedDataParallel`` wraps (a part of) a model.

    Call it after a forward pass; before, there are no such parts.

    Returns:
        ``id(parameter)`` -> attributes as in :func:`sharding`, with the placement ``FlatShard`` and ``elements``: the
        first held element of the whole (flat, in C order) and the one after the last.
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
