"""The options of a study, the settings and runs that follow from them, and its command."""

from __future__ import annotations

import math
import re
import shlex
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias, TypeVar, get_args

from gtrace.codecs import Codec, Identity
from gtrace.codecs import codec as build_codec
from gtrace.codecs.assignment import CodecTable, Coding
from gtrace.costs import Network
from gtrace.errors import UsageError, suggest
from gtrace.schedule import DEFAULT_REFIT, RefitSchedule
from gtrace.training.policies import FIXED, PolicySpec
from gtrace.training.tasks import Recipe, task_names

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gtrace.training.exchange import Nonfinite
    from gtrace.training.weights import WeightLevels

T = TypeVar("T")
#: what is compressed: weight gradients between workers, or the gradients that enter each layer's backward
Kind: TypeAlias = Literal["weight", "neural"]
KINDS: tuple[Kind, ...] = get_args(Kind)
#: for kind neural, layers with compressed output gradients: all but the last, or all
Layers: TypeAlias = Literal["inner", "all"]
LAYERS: tuple[Layers, ...] = get_args(Layers)


#: optimizers whose step includes the exchange, see :mod:`gtrace.training.joint` -> longest interval between exchanges
#: (DeepSpeed's default), None for one at every step; the uncompressed run beside them has Adam
JOINT = {"onebit-adam": None, "zeroone-adam": 16}
#: what goes through them if nobody names a codec
JOINT_CODEC = "ef-signsgd:scale=rms"
#: optimizers that the papers train with -> torch's class and its options
OPTIMIZERS: dict[str, tuple[str, dict[str, float]]] = {
    "sgd": ("SGD", {}),
    "momentum": ("SGD", {"momentum": 0.9}),
    "nesterov": ("SGD", {"momentum": 0.9, "nesterov": True}),
    "adam": ("Adam", {}),
    "amsgrad": ("Adam", {"amsgrad": True}),
    "adamw": ("AdamW", {}),
    # What a run without the exchange has.
    **dict.fromkeys(JOINT, ("Adam", {})),
}
#: share of the steps that are exact at first: DeepSpeed recommends 15 to 25%
_WARMUP = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyOptions:
    """Options of a study; None means the task's own value.

    Attributes:
        kind: ``weight`` for the gradients that travel between workers, ``neural`` for those that enter each layer's
            backward, see :mod:`gtrace.training.neural`; weight gradients are then averaged exactly.
        workers: simulated workers, each with its own mini-batch; by default 4, and 1 for kind neural.
        steps: optimizer steps; by default the task's.
        batch_size: samples per worker and step; by default the task's.
        lr: learning rate of the first step; by default the task's.
        seed: seed of the model, the batches and the rounding, not negative; the first one if there are several.
        seeds: number of seeds, run one after the other.
        refit: when codecs are fitted to the gradients, as :meth:`RefitSchedule.parse` reads it.
        nonfinite: what to do with a gradient that holds NaN or infinity, see
            :class:`~gtrace.training.exchange.Exchange`.
        eval_every: steps between two evaluations; by default a tenth of the steps.
        shadow: for kind neural, interval in steps at which the first worker's backward pass also runs exactly, and
            weight gradients are compared; None for never.
        layers: for kind neural, ``inner`` leaves out the gradient that the last layer gets from the loss.
        optimizer: one of ``OPTIMIZERS`` instead of the task's own. Those of ``JOINT`` exchange by themselves;
            ``onebit-adam:warmup=N`` sets the number of exact steps that it begins with, by default a fifth.
        every: steps that each worker makes alone between exchanges of weights, see
            :class:`gtrace.training.joint.LocalSteps`; for ``zeroone-adam`` the longest interval. None for none.
        clip: largest norm of the averaged gradient, instead of the task's.
        network: adds the duration of a step over it to the records.
        policies: policies for the bits of codecs that have them, as :meth:`PolicySpec.parse` reads it; each such codec
            has a run with each. With MQGrad's, the network is that of its paper by default, and its computing
            time a constant.
        min_size: tensors with fewer elements go uncompressed.
        down: codec of the server's average on its way to the workers, or ``same`` for theirs; empty for none.
        measure: interval in steps at which every metric of a sweep is measured on the averaged gradient;
            None for never. It does not change the training.
        weights: levels such as ``optimal5`` that forward and backward see instead of the weights, see
            :mod:`gtrace.training.weights`; each is one run with each of the codecs, besides the exact one.
    """

    kind: Kind = "weight"
    workers: int | None = None
    steps: int | None = None
    batch_size: int | None = None
    lr: float | None = None
    seed: int = 0
    seeds: int = 1
    refit: str | RefitSchedule = DEFAULT_REFIT
    nonfinite: Nonfinite = "skip"
    eval_every: int | None = None
    shadow: int | None = None
    layers: Layers = "inner"
    optimizer: str = ""
    every: int | None = None
    clip: float | None = None
    network: Network | None = None
    policies: Sequence[str | PolicySpec] = (FIXED,)
    min_size: int = 0
    down: str = ""
    measure: int | None = None
    weights: Sequence[str | WeightLevels] = ()

    def settings(self, recipe: Recipe, weights: Sequence[WeightLevels]) -> StudySettings:
        """Complete settings: the task's values replace None, and texts are parsed; ``weights`` by the caller.

        Raises:
            UsageError: a setting out of range.
        """
        steps = _chosen(self.steps, recipe.steps)
        policies = tuple(PolicySpec.parse(item) if isinstance(item, str) else item for item in self.policies)
        network = self.network
        if any(policy.name == "mqgrad" for policy in policies):
            # It uses the simulated time, and measured times would make runs differ.
            network = network or _PAPER_NETWORK
            if network.compute is None:
                network = replace(network, compute=DEFAULT_COMPUTE)
        given = {item.name: getattr(self, item.name) for item in fields(self)}
        return StudySettings(
            **{
                **given,
                # Neural gradients stay inside each worker.
                "workers": _chosen(self.workers, 4 if self.kind == "weight" else 1),
                "steps": steps,
                "batch_size": _chosen(self.batch_size, recipe.batch_size),
                "lr": _chosen(self.lr, recipe.lr),
                "refit": RefitSchedule.parse(self.refit) if isinstance(self.refit, str) else self.refit,
                "eval_every": _chosen(self.eval_every, max(1, steps // 10)),
                "network": network,
                "policies": policies,
                "down": self.down if self.down in ("", "same") else str(build_codec(self.down)),
                "weights": tuple(weights),
            }
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StudySettings(StudyOptions):
    """The settings that all runs of a study share: its options, all of them set."""

    workers: int
    steps: int
    batch_size: int
    lr: float
    refit: RefitSchedule
    eval_every: int
    policies: tuple[PolicySpec, ...]
    weights: tuple[WeightLevels, ...]

    def __post_init__(self) -> None:
        self._check_ranges()
        if self.kind not in KINDS:
            raise UsageError(f"kind: '{self.kind}' is unknown; {suggest(str(self.kind), KINDS)}")
        self._check_joint()
        for kind, given, text in (
            ("neural", self.shadow is not None, "shadow: compares weight gradients under compressed neural ones"),
            ("neural", self.layers != "inner", "layers: is about neural gradients"),
            ("weight", self.measure is not None, "measure: is about gradients between workers"),
            ("weight", self.network is not None, "network: neural gradients do not travel between workers"),
            ("weight", self.min_size or self.down, "min-size and down: neural gradients do not travel between workers"),
        ):
            if given and self.kind != kind:
                raise UsageError(f"{text}; choose kind {kind}")
        if self.nonfinite == "pass" and self.kind != "weight":
            raise UsageError("nonfinite: pass is for weight gradients; choose skip, zero or error")
        if self.down and self.network is not None and self.network.topology != "ps":
            raise UsageError(f"down: there is no server in a network of topology {self.network.topology}; choose ps")

    @property
    def method(self) -> str:
        """The name of the optimizer, without its parameter."""
        return self.optimizer.partition(":")[0]

    @property
    def warmup(self) -> int:
        """Exact steps at first of an optimizer of ``JOINT``."""
        given = self.optimizer.partition("warmup=")[2]
        return int(given) if given else max(1, round(_WARMUP * self.steps))

    @property
    def joint(self) -> str:
        """What runs are called that exchange anything but gradients; empty for none."""
        return joint_name(self.optimizer, self.every)

    def _check_joint(self) -> None:
        name, colon, parameter = self.optimizer.partition(":")
        if name and name not in OPTIMIZERS:
            raise UsageError(f"optimizer: '{name}' is unknown; {suggest(name, OPTIMIZERS)}")
        if colon and not (name in JOINT and re.fullmatch("warmup=[1-9][0-9]{0,8}", parameter)):
            able = ", ".join(f"{one}:warmup=100" for one in JOINT)
            raise UsageError(f"optimizer: '{self.optimizer}' cannot be read; parameters are those of {able}")
        if self.every is not None and JOINT.get(name, self.every) is None:
            raise UsageError(f"every: {name} exchanges at every step; leave one of the two out")
        if not self.joint:
            return
        for given, text in (
            (self.kind != "weight", "kind neural"),
            (any(policy.chooses for policy in self.policies), "policy"),
            (self.down, "down"),
            (self.measure is not None, "measure"),
            (self.network is not None, "network"),
            (self.weights, "weights"),
        ):
            if given:
                raise UsageError(f"{text}: is for gradients that are exchanged at every step; leave out {self.joint}")

    def _check_ranges(self) -> None:
        for name in ("seeds", "workers", "steps", "batch_size", "eval_every", "every", "shadow", "measure"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UsageError(f"{name.replace('_', ' ')}: {value} is below 1")
        if self.seed < 0:
            raise UsageError(f"seed: {self.seed} is below 0")
        for name, number in (("lr", self.lr), ("clip", self.clip)):
            if number is not None and not (math.isfinite(number) and number > 0):
                raise UsageError(f"{name}: must be a positive number, not {number:g}")


def _chosen(given: T | None, default: T) -> T:
    return default if given is None else given


#: MQGrad's cluster: 10 MB/s at the parameter server, and about 5 seconds of computing an iteration
_PAPER_NETWORK = Network(8e7, topology="ps")
DEFAULT_COMPUTE = 5.0


class RunPlan(NamedTuple):
    """The properties in which the runs of a study differ."""

    codec: Coding
    #: chooses its bits; None to keep them
    policy: PolicySpec | None = None
    #: quantization levels of weights in forward and backward; None for exact weights
    weights: WeightLevels | None = None
    #: see :attr:`StudySettings.joint`
    joint: str = ""

    @property
    def name(self) -> str:
        """The run's name: its codec's spec, after an @ the policy for its bits, then its levels of weights, or how it
        exchanges anything but gradients; the codec that an optimizer has anyway is left out.

        >>> from gtrace.codecs import codec
        >>> RunPlan(codec("ef:minmax:bits=4"), PolicySpec("adaptive")).name
        'ef:minmax@adaptive'
        """
        name = str(self.codec)
        if self.policy is not None and self.policy.chooses:
            name = f"{re.sub(r':bits=[0-9]+$|(?<=:)bits=[0-9]+,', '', name)}@{self.policy}"
        if self.joint:
            has_own = re.split("[: ]", self.joint)[0] in JOINT
            return self.joint if has_own and name == JOINT_CODEC else f"{name} {self.joint}"
        if self.weights is None:
            return name
        return f"weights={self.weights}" if self.codec == Identity() else f"{name} weights={self.weights}"


def plan_runs(codecs: Sequence[Coding], settings: StudySettings) -> list[RunPlan]:
    """The runs: each codec with bits with each policy, the others once; policies in the outer order of the codecs.

    With levels of weights, the first codec has a run with exact weights, and each other one (or the first, if it is
    alone) a run with each of the levels.
    """
    policies, weights = settings.policies, settings.weights
    if len(set(weights)) < len(weights):
        raise UsageError("weights: the same levels are named twice")
    if weights and settings.kind != "weight":
        raise UsageError("weights: with kind neural they stay exact; choose kind weight")
    if not policies or len({str(policy) for policy in policies}) < len(policies):
        raise UsageError("policy: none is named, or the same one twice")
    choosing = [policy for policy in policies if policy.chooses]
    if choosing and settings.kind != "weight":
        raise UsageError(f"policy {choosing[0].name}: chooses bits of what travels between workers; choose kind weight")
    flexible = [codec for codec in codecs if isinstance(codec, Codec) and "bits" in codec.parameters]
    if choosing and not flexible:
        raise UsageError(f"policy {choosing[0].name}: no codec with bits to choose; take one such as minmax or qsgdinf")
    plans: dict[tuple[str, str], RunPlan] = {}
    for codec in codecs:
        if not isinstance(codec, Codec) or codec not in flexible:
            plans[str(codec), ""] = RunPlan(codec)
            continue
        for policy in policies:
            ends = [codec.at_bits(bits) for bits in policy.bits]
            # Two codecs that differ only in bits give the same run under a policy.
            plans.setdefault((str(ends[0]) if ends else str(codec), str(policy)), RunPlan(codec, policy))
    plain, *others = plans.values()
    if not weights:
        return [plain, *(plan._replace(joint=settings.joint) for plan in others)]
    return [plain, *(plan._replace(weights=levels) for plan in others or [plain] for levels in weights)]


def joint_name(optimizer: str, every: int | None) -> str:
    """How workers exchange anything but gradients; empty if they do not.

    >>> joint_name("zeroone-adam", 8), joint_name("adam", 16), joint_name("adam", None)
    ('zeroone-adam every=8', 'every=16', '')
    """
    words = [optimizer] if optimizer.partition(":")[0] in JOINT else []
    return " ".join([*words, *([] if every is None else [f"every={every}"])])


def repeat_command(task: str, codecs: Sequence[Coding], settings: StudySettings) -> str:
    """As one would type it, the exact codec first; empty for tasks that are not built in and tables without a file."""
    tables = [item for item in codecs if isinstance(item, CodecTable)]
    named = [str(item) for item in codecs[1:] if item not in tables] or ([] if tables else [str(codecs[0])])
    if task not in task_names() or not all(item.source for item in tables):
        return ""
    always = ("workers", "steps", "batch_size", "lr", "seed", "refit", "nonfinite", "eval_every")
    options: dict[str, object | None] = {
        "--task": task,
        **{f"--{name.replace('_', '-')}": getattr(settings, name) for name in always},
        "--seeds": settings.seeds if settings.seeds > 1 else None,
        "--optimizer": settings.optimizer or None,
        "--every": settings.every,
        "--clip": settings.clip,
        "--weights": ",".join(map(str, settings.weights)) or None,
        "--network": None if settings.network is None else settings.network.spec,
        "--min-size": settings.min_size or None,
        "--down": settings.down or None,
        "--kind": settings.kind if settings.kind != "weight" else None,
        "--layers": settings.layers if settings.kind != "weight" else None,
        "--shadow": settings.shadow,
        "--measure": settings.measure,
    }
    options = {name: value for name, value in options.items() if value is not None}
    policies = settings.policies
    chosen = [] if policies == (PolicySpec(),) else [("--policy", policy) for policy in policies]
    pairs = [*(("--plan", item.source) for item in tables), *options.items(), *chosen]
    codecs_named = [",".join(named)] if named else []
    return shlex.join(["gtrace", "study", "compare", *codecs_named, *(str(word) for pair in pairs for word in pair)])
