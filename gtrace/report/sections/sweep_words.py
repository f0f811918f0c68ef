"""The answer of a sweep in plain words."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from gtrace.report.analysis.cells import CODED
from gtrace.report.analysis.families import LEVEL, Family
from gtrace.report.analysis.safety import averaged_over
from gtrace.report.names import MISSING, count, listed, number, percent

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from gtrace.report.analysis.evidence import PairedComparison
    from gtrace.report.analysis.side_by_side import SideBySide
    from gtrace.report.analysis.sweep import SweepAnalysis
    from gtrace.report.analysis.tensors import TensorGroup


#: Methods that the first sentence names: a tired reader stops there.
_FIRST = 3
#: Methods and layers that a sentence names before it counts.
_NAMED = 6
_LAYERS = 3
#: Part of an error that is bias, from which on it is named.
_BIASED = 0.1


def sweep_verdict(analysis: SweepAnalysis) -> list[str]:
    """Sentences that say which method has the least error at equal measured bits, and how sure that is."""
    if not analysis.rows:
        return ["Nothing was measured: the sweep has no rows."]
    if not analysis.measured:
        return ["Nothing can be compared: no row holds an error that is a number."]
    k = analysis.decisive
    if k < 0:
        wanted = listed([f"{t:g}" for t in analysis.targets])
        nowhere = f"no method was measured near {wanted} bits per value."
        return [
            f"Nothing to compare: {nowhere if wanted else 'no method has both an error and a known number of bits.'}"
        ]
    found = analysis.ranking(k)
    at = f"At {bits_in_words(analysis.targets[k])} per value"
    basis = analysis.basis
    over = f" over {basis.steps_in_words}" if basis.window else ""
    over += f" with {basis.workers:,} workers" if basis.workers > 1 else ""
    if len(found) == 1:
        only, own = found[0], found[0].at[k]
        at = f"At {bits_in_words(float(f'{own.bits:.3g}'))} per value"
        lost = f"{energy_share(own.variance)} of gradient energy"
        return [f"{at}, {only.label} loses {lost}{over}; no other method was measured there."]
    named = [f"{f.label} ({_amount(f, k, 'has')})" for f in found[1:]]
    least = _amount(found[0], k, "it has", " of gradient energy")
    said = [f"{at}, {found[0].label} loses least{over} ({least}), then {listed(named[: _FIRST - 1])}."]
    if named[_FIRST - 1 :]:
        said.append(f"Behind them: {listed(named[_FIRST - 1 :], _NAMED)}.")
    for more in (_how_sure, _bias, _coders, _elsewhere, _over_training, _layers):
        said += more(analysis, k)
    return said


def _amount(family: Family, k: int, has: str, of: str = "") -> str:
    """``4.6%``, or ``has 3.0% at 1.99 bits`` when it needs fewer bits than the target."""
    at = family.at[k]
    lost = f"{energy_share(at.variance)}{of}"
    return f"{has} {lost} at {number(at.bits)} bits" if at.elsewhere else lost


def _bias(analysis: SweepAnalysis, k: int) -> Iterator[str]:
    """Whose error does not shrink with more workers, when not everybody's does or nobody's."""
    shares = {f.label: f.at[k].bias / f.at[k].variance for f in analysis.ranking(k) if f.at[k].variance > 0}
    biased = [f"{label} ({percent(share)})" for label, share in shares.items() if share > _BIASED]
    if biased and (len(biased) < len(shares) or any(c.bias_known for c in analysis.configurations)):
        yield f"More workers do not shrink the part of an error that is bias: {listed(biased)}."


def _coders(analysis: SweepAnalysis, k: int) -> Iterator[str]:
    """Whether another coder of the symbols has another leader."""
    here, target = {f.label for f in analysis.leaders(k)}, analysis.targets[k]
    own = analysis.basis.coder
    said: dict[tuple[str, float], list[str]] = {}
    for coder, found in analysis.coder_leaders.items():
        if coder != own and found.label not in here:
            said.setdefault((found.label, found.target), []).append(CODED[coder])
    elsewhere = any(rate != target for _, rate in said)

    def at(rate: float) -> str:
        return f" at {bits_in_words(rate)}" if elsewhere else ""

    others = [f"{listed(how)} {label} leads{at(rate)}" for (label, rate), how in said.items()]
    sentence = f"{', '.join(others)}; {CODED[own]} {analysis.ranking(k)[0].label} does{at(target)}."
    if said:
        yield f"{sentence[:1].upper()}{sentence[1:]}"


def _how_sure(analysis: SweepAnalysis, k: int) -> Iterator[str]:
    """The leader against those that are too close to call, and against the first that is not; and whose gradients."""
    found, level = analysis.ranking(k), analysis.leaders(k)
    if len(level) > 1:
        yield f"{listed([f.label for f in level])} are too close to call: {_doubt(analysis, level, k)}."
    behind = next((f.label for f in found if f not in level), "")
    compared = analysis.comparison(found[0].label, behind, analysis.targets[k])
    if compared is not None:
        yield f"{found[0].label} has {compared_in_words(compared)}."
    ranks = averaged_over(analysis.provenance)
    if ranks > 1:
        yield (
            f"Measured on averages over {ranks} ranks: the gradients that each would send have more noise, "
            "so errors on the wire will be larger."
        )


def _doubt(analysis: SweepAnalysis, level: Sequence[Family], k: int) -> str:
    known = [analysis.comparison(level[0].label, f.label, analysis.targets[k]) for f in level[1:]]
    found = [c for c in known if c is not None]
    if all(f.at[k].variance <= level[0].at[k].variance * (1 + LEVEL) for f in level):
        return "their errors are nearly the same"
    unsure = next((c for c in found if not c.by_elements.known), None)
    if unsure is not None:
        return f"{unsure.first} was better in {percent(unsure.better)} of training, but {unsure.by_elements.why}"
    return f"the differences are within the noise of {count(found[0].by_elements.count, 'step')}"


def compared_in_words(compared: PairedComparison) -> str:
    """``0.54 times the error of zipml (95%: 0.46 to 0.63)``, or why there is no interval."""
    ratio, low, high = compared.by_elements.exp()
    said = f"{number(ratio, 2)} times the error of {compared.second}"
    if compared.by_elements.known:
        sure = "" if compared.differs else f", not beyond the noise of {count(compared.by_elements.count, 'step')}"
        return f"{said} (95%: {number(low, 2)} to {number(high, 2)}){sure}"
    return f"{said} and less in {percent(compared.better)} of training, but {compared.by_elements.why}"


def _elsewhere(analysis: SweepAnalysis, k: int) -> Iterator[str]:
    """Who leads at the other targets, if there is a choice at all."""
    here = analysis.leaders(k)
    led: dict[tuple[str, ...], list[float]] = {}
    for j, target in enumerate(analysis.targets):
        if j != k and len(analysis.ranking(j)) > 1:
            led.setdefault(tuple(f.label for f in analysis.leaders(j)), []).append(target)
    for labels, targets in led.items():
        verb = "leads" if len(labels) == 1 else "lead"
        also = " as well" if {f.label for f in here}.issuperset(labels) else ""
        bits = "bit" if targets == [1.0] else "bits"
        yield f"{listed(labels)} {verb} at {listed([f'{t:g}' for t in targets])} {bits}{also}."


def _over_training(analysis: SweepAnalysis, k: int) -> Iterator[str]:
    """Thirds of training where another method has the least error than over all of it."""
    leader = analysis.ranking(k)[0].label
    said = []
    for phase in analysis.phases:
        known = {f.label: at for f, at in zip(analysis.families, phase.at[:, k], strict=True) if math.isfinite(at)}
        best = min(known, key=known.__getitem__, default=leader)
        if best != leader and leader in known:
            values = f"{best} {energy_share(known[best])}, {leader} {energy_share(known[leader])}"
            said.append(f"{phase.name} (steps {phase.first:,} to {phase.last:,}) {values}")
    if said:
        yield f"The leader changes over training: {'; '.join(said)}."


def _layers(analysis: SweepAnalysis, _k: int) -> Iterator[str]:
    """Layers that another method suits better beyond the noise of steps, the clearest first."""
    sure = sorted((c for c in analysis.layer_choices if c.sure), key=lambda c: c.ratio)
    shown = [f"{c.tensor} prefers {c.best} ({number(c.ratio, 2)} times the error)" for c in sure[:_LAYERS]]
    more = f" and {len(sure) - _LAYERS} more" if len(sure) > _LAYERS else ""
    if sure:
        at = bits_in_words(sure[0].bits)
        yield f"At {at} per value of the layer itself, {', '.join(shown)}{more}, against {sure[0].leader}."


def off_target(analysis: SweepAnalysis) -> list[str]:
    """Where the methods lie that no target reaches, as ``terngrad 523% at 0.60 bits``."""
    found = []
    for family in analysis.families:
        if analysis.lossless(family) or any(math.isfinite(at.variance) for at in family.at):
            continue
        points = [analysis.configurations[i] for i in family.members]
        points = [c for c in points if math.isfinite(c.bits) and math.isfinite(c.error)]
        if points:
            near = min(points, key=lambda c: min(abs(c.bits - t) for t in analysis.targets or (0.0,)))
            found.append(f"{family.label} {energy_share(near.error)} at {number(near.bits)} bits")
    return found


def bits_in_words(target: float) -> str:
    """``1 bit``, ``2.5 bits``."""
    return f"{target:g} {'bit' if target == 1 else 'bits'}"


def energy_share(error: float) -> str:
    """An error over the gradient's energy, as verdicts and the table at equal bits show it.

    >>> energy_share(0.0459), energy_share(2.78)
    ('4.6%', '278%')
    """
    return f"{number(100 * error, 2)}%" if math.isfinite(error) else MISSING


def signed_percent(change: float) -> str:
    """``-18%``, ``+4.2%``: two digits are all that such a mean is good for."""
    return f"{100 * change:+.{0 if abs(change) >= 0.0995 else 1}f}%"


def groups_in_words(groups: Sequence[TensorGroup]) -> list[str]:
    """The answer for each group, for as many as a reader wants to read."""
    firsts = [(group.name, sweep_verdict(group.analysis)[0]) for group in groups[:_NAMED]]
    said = [f"In {name}, {sentence[:1].lower()}{sentence[1:]}" for name, sentence in firsts]
    return [*said, f"{len(groups) - _NAMED} more groups are in the table."] if len(groups) > _NAMED else said


def side_by_side_verdict(pair: SideBySide) -> Iterator[str]:
    """How much more or less error the same codecs make in a second sweep, and what only one of them has."""
    known = sorted(c.ratio for c in pair.shared if math.isfinite(c.ratio))
    if not pair.shared:
        yield "No codec is in both sweeps."
    elif not known:
        yield f"{count(len(pair.shared), 'configuration')} in both, none with errors to compare."
    else:
        middle = math.sqrt(known[(len(known) - 1) // 2] * known[len(known) // 2])
        yield (
            f"{count(len(pair.shared), 'configuration')} in both: {pair.second} has {number(middle)} times the error "
            f"of {pair.first} in the median, {number(known[0])} to {number(known[-1])} times."
        )
        if pair.paired:
            sure = sum(c.differs for c in pair.shared)
            none = sum(not c.by_elements.known for c in pair.shared)
            unsure = f"; {none} have too few steps to compare" if none else ""
            yield (
                f"Paired on {count(pair.tensors, 'tensor')} and {count(pair.steps, 'step')} that both have: "
                f"{sure} differ beyond the noise of steps{unsure}."
            )
        else:
            yield "No tensor at any step is in both, so these are ratios of sums over different gradients."
    if pair.same_trace is False:
        yield "The sweeps are of different traces: the ratios hold the difference of the runs as well."
    for name, specs in ((pair.first, pair.only_first), (pair.second, pair.only_second)):
        if specs:
            yield f"Only in {name}: {listed(specs)}."
