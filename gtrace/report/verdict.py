"""The answer: whether to compress, with what, what that saves and costs, and how sure it is.

The rule, in this order:

1. A configuration is a candidate if it was measured on all tensors and steps and its cost is below a limit: those
   judged safe, by what their noise and bias are predicted to cost (:mod:`gtrace.report.analysis.safety`). If neither a
   prediction nor the noise ratio is known, the limit is on the error instead: at most :data:`ERROR_LIMIT` of the
   gradient's energy, after averaging over the user's workers, and over windows of steps if codecs with memory take
   part.
2. Without a network the candidate with the fewest measured bits wins; with one, the candidate with the shortest step.
   float32 and bf16 always take part, whether they were measured or not: they need no codec.
3. Within :data:`CLOSE` of the best the simplest wins (float32, bf16 and fp16, fixed grids, fitted grids, sparsifiers,
   then anything wrapped), and of equally simple ones the one with the least error.
4. If the winner needs no codec, the answer is not to compress.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING

import numpy as np

from gtrace.report.analysis.families import FITTED, PLAIN, Configuration
from gtrace.report.analysis.safety import SAFE_COST, SAFE_SHORTER, rate_in_words
from gtrace.report.names import count, energy_share, listed, number
from gtrace.report.section import Answer, Verdict
from gtrace.report.statistics import thirds
from gtrace.units import rate_text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gtrace.report.analysis.savings import Saving, Savings
    from gtrace.report.analysis.sweep import SweepAnalysis

#: Share of the gradient's energy that a codec may lose when its cost in batch size is not known.
ERROR_LIMIT = 0.05
#: Bits or steps that differ by less than this part are the same.
CLOSE = 0.02
_SPARSE = ("ratio", "sparsity", "amount")
#: methods that need no codec and lose next to nothing: at most 0.0004%, but for denormal values
_EXACT_ENOUGH = ("none", "bf16")


@dataclass(frozen=True, slots=True)
class Candidate:
    """A configuration as the rule sees it.

    Attributes:
        name: in words, e.g. ``qsgdinf at 4 bits``.
        method: its codec's name with everything around it.
        bits: measured bits per value.
        error: share of the gradient's energy that is lost for the user's workers; NaN if not measured.
        within: whether its cost is below the limit.
        seconds: of a step on the user's network; NaN without one.
        simplicity: the smaller, the simpler.
    """

    name: str
    codec: str
    method: str
    bits: float
    error: float
    within: bool
    seconds: float = math.nan
    simplicity: tuple[int, ...] = (0,)


@dataclass(frozen=True, slots=True)
class RuledChoice:
    """What the rule chose.

    Attributes:
        answer: of the four that there are.
        chosen: the winner; None if nothing is safe or nothing was measured.
        close: other codecs too close to call: as few bits or as short a step, and as little error.
        best: the one with the fewest bits or the shortest step.
    """

    answer: Answer
    chosen: Candidate | None = None
    close: tuple[Candidate, ...] = ()
    best: Candidate | None = None


def choose(candidates: Sequence[Candidate], *, network: bool) -> RuledChoice:
    """Apply the rule of this module; on a network ``seconds`` decide, and not ``bits``."""
    price = attrgetter("seconds" if network else "bits")
    if not any(one.method not in PLAIN and math.isfinite(one.error) for one in candidates):
        return RuledChoice("not measured")
    fit = [one for one in candidates if one.within and math.isfinite(price(one))]
    if all(one.method in PLAIN for one in fit):
        return RuledChoice("nothing is safe", best=min(fit, key=price, default=None))
    best = min(fit, key=price)
    near = [one for one in fit if price(one) <= price(best) * (1 + CLOSE)]
    near.sort(key=lambda one: (one.simplicity, one.error, one.bits))
    chosen, *others = near
    close = {chosen.method: chosen}
    for one in others:
        if one.error <= chosen.error * (1 + CLOSE):
            close.setdefault(one.method, one)
    answer: Answer = "do not compress" if chosen.method in PLAIN else "compress"
    return RuledChoice(answer, chosen, tuple(close.values())[1:], best)


def simplicity(method: str, setting: str) -> tuple[int, ...]:
    """How simple a codec is to run and to explain: wrappers count most, then what it is."""
    if method in PLAIN:
        return (0, 0 if method == "none" else 1)
    kind = 4 if setting.startswith(_SPARSE) else 3 if method in FITTED else 2
    return (method.count(":"), kind)


def candidates_of(analysis: SweepAnalysis, savings: Savings | None) -> list[Candidate]:
    """Every configuration of a sweep as the rule sees it, and float32 and bf16; arguments as of :func:`verdict_of`."""

    def seconds(spec: str) -> float:
        row = None if savings is None else savings.best(spec)
        return math.nan if row is None else row.step.seconds

    found = []
    for c in analysis.configurations:
        known = analysis.safety.judged.get(c.spec)
        error = c.error if math.isfinite(c.error) else c.relative_variance
        within = error <= ERROR_LIMIT
        if known is not None and (known.verdict == "safe" or known.prediction or known.ratio.known):
            within = known.verdict == "safe"
        within = (within and not c.partial) or (c.method in _EXACT_ENOUGH and not error > ERROR_LIMIT)
        simple = simplicity(c.method, c.setting)
        found.append(Candidate(_in_words(c), c.spec, c.method, c.bits, error, within, seconds(c.spec), simple))
    for spec in _EXACT_ENOUGH:
        if all(one.method != spec for one in found):
            simple = simplicity(spec, "")
            found.append(Candidate(spec, spec, spec, PLAIN[spec], math.nan, True, seconds(spec), simple))
    return found


def _in_words(c: Configuration) -> str:
    if math.isfinite(c.nominal_bits) and c.setting.startswith("b"):
        return f"{c.family} at {c.nominal_bits:g} bits"
    return f"{c.family} with {c.setting}" if c.setting else c.family


def short_list(candidates: Sequence[Candidate], *, network: bool, most: int) -> list[Candidate]:
    """The recommended configuration, then the best one of each other method, at most ``most`` in all.

    The best of a method is its own choice by the rule; of a method that is not below the limit, the one with the least
    error that is not more expensive than the recommended one, or with the least error at all. bf16 is always there, and
    with a network float32.
    """
    choice = choose(candidates, network=network)
    first = choice.chosen
    price = attrgetter("seconds" if network else "bits")
    limit = math.inf if first is None else price(first) * (1 + CLOSE)

    def order(one: Candidate) -> tuple[bool, bool, float]:
        if one.within:
            return (False, False, price(one))
        return (True, not price(one) <= limit, one.error)

    best: dict[str, Candidate] = {}
    for one in sorted(candidates, key=order):
        if math.isfinite(one.error) or one.method in PLAIN:
            best.setdefault(one.method, one)
    if first is not None:
        best[first.method] = first
    baselines = [best.pop(name) for name in ("bf16", "none") if name in best and (network or name == "bf16")]
    best.pop("none", None)
    named = [one for one in (first, *choice.close, choice.best) if one is not None]
    rest = sorted(best.values(), key=order)
    shown = list(dict.fromkeys([*named, *baselines, *rest]))[:most]
    return sorted(shown, key=lambda one: (one is not first, not one.within, price(one)))


def verdict_of(analysis: SweepAnalysis, savings: Savings | None) -> Verdict:
    """The verdict on a sweep; with step times on the user's network if there is one."""
    choice = choose(candidates_of(analysis, savings), network=savings is not None)
    confidence = _confidence(choice, analysis, savings)
    chosen = choice.chosen
    if choice.answer == "not measured":
        why = (
            "every gradient of this sweep is zero" if analysis.zero else "this sweep has no measured error of any codec"
        )
        sentence = f"none: {why}"
        return Verdict(choice.answer, sentence, "not measured", "not measured", confidence)
    if choice.answer == "nothing is safe" or chosen is None:
        limit = f"{SAFE_COST:.0%} of the batch" if analysis.safety.known else f"{ERROR_LIMIT:.0%} of gradient energy"
        kept = "" if savings is None else f"; bf16 saves {_saved(*reversed(savings.plain))}"
        tried = {c.spec for c in analysis.configurations if c.method not in PLAIN}
        none = f"none of {len(tried)} configurations stays" if len(tried) > 1 else f"{listed(tried)} does not stay"
        sentence = f"don't compress: {none} below {limit}"
        return Verdict(choice.answer, sentence, f"nothing{kept}", "nothing", confidence)
    if choice.answer == "do not compress":
        return _uncompressed(choice, chosen, savings, confidence)
    sentence = chosen.name
    if choice.close:
        sentence += f" (too close to call: {listed([one.name for one in choice.close], 3)})"
    saves = f"{32 / chosen.bits:.1f}x fewer bytes than float32, {16 / chosen.bits:.1f}x than bf16"
    if savings is not None and (best := savings.best(chosen.codec)) is not None:
        saves += f"; {_saved(best, savings.plain[1])} on {savings.cluster.ranks} ranks"
    workers = analysis.basis.workers
    averaged = f" after averaging {workers} workers" if workers > 1 else ""
    error = f"{energy_share(chosen.error, 3)} of gradient energy{averaged}"
    judgement = analysis.safety.judged.get(chosen.codec)
    prediction = None if judgement is None else analysis.safety.record(judgement)
    costs = f"loses {error}; cost in batch size not measured"
    if judgement is not None and prediction is None:
        costs = f"loses {error}; {judgement.verdict}: {judgement.reason}"
    elif judgement is not None:
        costs = f"{judgement.reason.removeprefix('costs ')}: {judgement.verdict}; loses {error}"
    numbers = chosen.codec, chosen.bits, chosen.error, prediction
    return Verdict(choice.answer, sentence, saves, costs, confidence, *numbers)


def _uncompressed(choice: RuledChoice, chosen: Candidate, savings: Savings | None, confidence: str) -> Verdict:
    name = "float32" if chosen.method == "none" else chosen.method
    best = choice.best
    if best is None or best.codec == chosen.codec:
        sentence = f"don't compress: no safe codec here is better than {name}"
    else:
        row, pays = None if savings is None else savings.best(best.codec), ""
        # The column "pays below" has the same number. Where a codec gains more than its 1%, it would be no slower link.
        if row is not None and savings is not None and 0 < row.bandwidth < savings.cluster.network.bandwidth:
            pays = f"; it pays below {rate_text(row.bandwidth, digits=3)}"
        sentence = f"don't compress: {name} is within {CLOSE:.0%} of the best codec here ({best.name}{pays})"
    saves = f"{32 / chosen.bits:.1f}x fewer bytes than float32" if chosen.bits < 32 else "nothing"
    if savings is not None and (plain := savings.best(chosen.method)) is not None and chosen.bits < 32:
        saves += f"; {_saved(plain, savings.plain[0])}"
    costs = f"loses {energy_share(chosen.error, 3)} of gradient energy"
    numbers = (chosen.codec, chosen.bits, chosen.error) if math.isfinite(chosen.error) else (None, chosen.bits)
    if chosen.method == "none":
        costs = "nothing"
    elif not math.isfinite(chosen.error):
        costs = "bf16's error is not measured here: add bf16 to --methods"
    return Verdict("do not compress", sentence, saves, costs, confidence, *numbers)


def _saved(row: Saving, reference: Saving) -> str:
    share = 1 - row.step.seconds / reference.step.seconds
    name = "float32" if reference.spec == "none" else reference.spec
    return f"{share:.0%} of a step against {name}" if share >= 0.005 else f"no time against {name}"


def _confidence(choice: RuledChoice, analysis: SweepAnalysis, savings: Savings | None) -> str:
    said = [f"{count(len(analysis.steps), 'step')}, {count(len(analysis.tensors), 'tensor')}"]
    if choice.chosen is not None and choice.answer == "compress":
        said[0] += _over_training(choice.chosen, analysis)
        if savings is None:
            # With a network the shortest step won, not the fewest bits.
            said += _unclear(choice.chosen, analysis)
    missing = []
    if choice.answer == "not measured":
        return said[0]
    if not analysis.safety.known:
        missing.append("gradient noise (gtrace capture --noise)")
    elif analysis.safety.outlook.why:
        missing.append(f"what noise costs ({analysis.safety.outlook.why})")
    if analysis.safety.outlook.assumed:
        missing.append("the length of the training (gtrace report --horizon STEPS)")
    if savings is None:
        missing.append("step time (gtrace report --cluster 8x25Gbit/s,180ms)")
    if missing:
        said.append(f"not measured: {listed(missing)}")
    return "; ".join(said)


def _unclear(chosen: Candidate, analysis: SweepAnalysis) -> list[str]:
    """A configuration with fewer bits that only its interval or Adam's learning rate keeps from being safe."""
    judged = analysis.safety.judged
    unclear = [c for c in analysis.configurations if c.spec in judged and judged[c.spec].close and not c.partial]
    best = min(unclear, key=lambda c: c.bits, default=None)
    if best is None or not best.bits < chosen.bits * (1 - CLOSE):
        return []
    taken = f"{number(best.bits)} instead of {number(chosen.bits)} bits"
    found = judged[best.spec].prediction
    rate = f", with {rate_in_words(found.shorter)}," if found is not None and found.shorter > SAFE_SHORTER else ""
    return [f"{_in_words(best)}{rate} would take {taken}; train to find out"]


def _over_training(chosen: Candidate, analysis: SweepAnalysis) -> str:
    """Whether early, middle and late steps agree that the error is below its limit."""
    place = next(k for k, c in enumerate(analysis.configurations) if c.spec == chosen.codec)
    errors = analysis.per_step[place]
    known = np.isfinite(errors)
    parts = {name: errors[mask & known] for name, mask in thirds(analysis.steps) if (mask & known).any()}
    if len(parts) < 2:
        return " (too few to see a trend)"
    means = {name: float(values.mean()) for name, values in parts.items()}
    most, least = max(means.values()), min(means.values())
    if most <= 2 * least:
        return f" ({listed(means)} agree)"
    worst = max(means, key=lambda name: means[name])
    more = f"{number(most / least, 2)} times as much as others" if least > 0 else "most"
    return f" ({worst} steps lose {more})"
