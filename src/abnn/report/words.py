"""What the figures say, in sentences: pure functions from figures, verdicts and costs to words.

Nothing is claimed beyond its verdict: a figure that was not tested is told as a number only.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from abnn.report.data import Method, ReportData
from abnn.report.names import (
    PERCENT,
    at,
    better_is_more,
    count,
    dataset,
    duration,
    figure_name,
    headline,
    joined,
    label,
    number,
    percent,
    plain,
    size,
    times,
)

BETTER, WORSE, SAME = "better", "worse", "no difference shown"
SYMBOLS = {BETTER: "▲", WORSE: "▼", SAME: "·"}
# Up to so many times the time of a prediction is a price that needs no second thought.
TIMES = 10
FALSE_ALARMS, KEPT = 0.05, 0.8

# Of one method, and of several.
_IN_SUMMARY = {
    "Worth it": ("is worth it", "are worth it"),
    "A trade-off": ("is a trade-off", "are trade-offs"),
    "No difference shown": ("shows no difference", "show no difference"),
    "Not worth it": ("is not worth it", "are not worth it"),
    "Not compared": ("was not tested", "were not tested"),
}

RULE = (
    "The judgement looks at accuracy, NLL, ECE, AURC and the AUROC of each foreign dataset (by "
    "confidence), each tested against the reference on the same examples, with a correction for "
    "the number of tests.",
    "“No difference shown”: not one of them is better or worse.",
    "“Not worth it”: some are worse and none is better; or a cheaper method is better at the same "
    "ones too, worse at none, and its figures are at least as good.",
    "“A trade-off”: some are better and some are worse; or some are better and none is worse, but "
    f"a prediction takes more than {TIMES} times as long, or more parameters are added than the "
    "network has, or the time of a prediction is not known.",
    "“Worth it”: some are better, none is worse, and none of the above holds.",
    "“Not compared”: none of these figures was tested.",
)


@dataclass(frozen=True)
class Judgement:
    """One word about a method beside the reference, and why.

    Args:
        word: as in `RULE`.
        why: one sentence.
    """

    word: str
    why: str


@dataclass(frozen=True)
class Sentence:
    """One thing that a manager should know, with the verdict it rests on, if on one.

    Args:
        text: the sentence.
        proof: the figures behind it.
        verdict: "better", "worse", "no difference shown" or `None`.
    """

    text: str
    proof: str = ""
    verdict: str | None = None


def reference(data: ReportData) -> Method | None:
    """The method that all others are compared with."""
    return next((m for m in data.methods if m.reference), None)


def with_verdict(method: Method, verdict: str) -> list[str]:
    """The figures of the headline that have this verdict."""
    return [n for n in headline(method.verdicts) if method.verdicts[n].verdict == verdict]


def slower(method: Method, base: Method) -> float | None:
    """How many times as long a prediction takes; by its passes where no time was measured."""
    if method.cost.milliseconds is not None and base.cost.milliseconds:
        return method.cost.milliseconds / base.cost.milliseconds
    if method.cost.passes is not None:
        return method.cost.passes / (base.cost.passes or 1.0)
    return None


def cheaper(method: Method, than: Method) -> bool:
    """Whether a prediction takes clearly less time and no more parameters are added."""
    ratio = slower(method, than)
    mine, its = method.cost.parameters, than.cost.parameters
    return ratio is not None and ratio < 0.9 and (mine is None or its is None or mine <= its)


def as_good(method: Method, other: Method, name: str) -> bool:
    """Whether a method's figure is at least that of another, as far as it is known."""
    if name not in method.figures or name not in other.figures:
        return False
    difference = method.figures[name] - other.figures[name]
    return difference >= 0 if better_is_more(name) else difference <= 0


def cheaper_ones(method: Method, data: ReportData) -> list[Method]:
    """The cheaper methods of the same run, or of no run in particular, without the reference."""
    return [
        other
        for other in data.methods
        if not other.reference and other.run in ("", method.run) and cheaper(other, method)
    ]


def rivals(method: Method, data: ReportData, names: Iterable[str]) -> list[Method]:
    """Cheaper methods that beat the reference at these figures too, and are worse at none.

    Their figures are at least as good as the method's.
    """
    names = list(names)
    return [
        other
        for other in cheaper_ones(method, data)
        if not with_verdict(other, WORSE)
        and all(n in with_verdict(other, BETTER) and as_good(other, method, n) for n in names)
    ]


def judge(method: Method, data: ReportData) -> Judgement:
    """The judgement of a method, by `RULE`."""
    base = reference(data)
    better, worse = with_verdict(method, BETTER), with_verdict(method, WORSE)
    tested = len(headline(method.verdicts))
    if base is None or not tested:
        return Judgement("Not compared", "Its figures were not tested against a reference.")
    if not better and not worse:
        return Judgement(
            "No difference shown", f"Not one of the {tested} figures tested shows a difference."
        )
    if not better:
        return Judgement("Not worth it", f"Worse at {names_of(worse)}, and better at nothing.")
    gains = f"Better at {names_of(better)}"
    if worse:
        return Judgement("A trade-off", f"{gains}, but worse at {names_of(worse)}.")
    if found := rivals(method, data, better):
        return Judgement(
            "Not worth it", f"{gains}; but {label(found[0])} costs less and does as well."
        )
    ratio, whole, added = slower(method, base), data.parameters, method.cost.parameters
    if ratio is None:
        return Judgement("A trade-off", f"{gains} and worse at nothing; its cost is not known.")
    if ratio > TIMES:
        return Judgement(
            "A trade-off",
            f"{gains} and worse at nothing, but a prediction takes {times(ratio)} as long.",
        )
    if whole is not None and added is not None and added > whole:
        return Judgement(
            "A trade-off",
            f"{gains} and worse at nothing, but it adds {times(added / whole)} the parameters of "
            "the network.",
        )
    return Judgement("Worth it", f"{gains}, and worse at nothing.")


def names_of(names: Iterable[str]) -> str:
    """Figures in a sentence; several AUROCs are told once.

    >>> names_of(["nll", "ood/svhn/msp/auroc", "ood/dtd/msp/auroc"])
    'NLL and AUROC of svhn and dtd'
    """
    names = list(names)
    found = [_in_text(figure_name(n)) for n in names if dataset(n) is None]
    if foreign := [d[0] for n in names if (d := dataset(n))]:
        found.append(f"AUROC of {joined(foreign)}")
    return joined(found)


def _in_text(name: str) -> str:
    """A name within a sentence: an abbreviation stays as it is."""
    return name if name.isupper() else name.lower()


def summary(data: ReportData) -> str:
    """The whole report in a sentence or two."""
    base = reference(data)
    others = [m for m in data.methods if not m.reference]
    size_of = f"{count(data.n)} labelled examples"
    if data.ood:
        size_of += f" and {joined(f'{count(n)} from {name}' for name, n in data.ood.items())}"
    if base is None or not others:
        return f"One method was measured, on {size_of}; there is nothing to compare it with."
    groups: dict[str, list[str]] = {}
    for m in others:
        groups.setdefault(judge(m, data).word, []).append(label(m))
    told = [
        f"{joined(found)} {_IN_SUMMARY[word][len(found) > 1]}"
        for word in _IN_SUMMARY
        if (found := groups.get(word))
    ]
    return f"Compared with {label(base)}, {'; '.join(told)}. Measured on {size_of}."


def sentences(method: Method, data: ReportData) -> list[Sentence]:
    """What changed against the reference, and what it costs."""
    base = reference(data)
    if base is None or method is base:
        return []
    found = [_mistakes(method, base), _confidence(method, base), _selective(method, base)]
    found += [_noticed(method, base, name) for name in data.ood]
    return [s for s in found if s is not None] + costs(method, data) + hints(method, data)


def costs(method: Method, data: ReportData) -> list[Sentence]:
    """What a method costs, in one sentence; of the reference its time alone."""
    base, cost, told = reference(data), method.cost, []
    if cost.milliseconds is not None:
        time = duration(cost.milliseconds / 1000)
        if base is None or base is method or not base.cost.milliseconds:
            told.append(time)
        elif abs(cost.milliseconds / base.cost.milliseconds - 1) < 0.05:
            told.append(f"as long ({time})")
        else:
            ratio = times(cost.milliseconds / base.cost.milliseconds)
            before = duration(base.cost.milliseconds / 1000)
            told.append(f"{ratio} as long ({time} instead of {before})")
    elif cost.passes is not None:
        told.append(f"{cost.passes:.3g} forward pass{'' if cost.passes == 1 else 'es'}")
    told = [f"a prediction takes {told[0]}"] if told else []
    if cost.parameters:
        share = (
            f" ({percent(100 * cost.parameters / data.parameters)})"
            if data.parameters and cost.parameters >= data.parameters / 2000
            else ""
        )
        what = "parameter" if cost.parameters == 1 else "parameters"
        told.append(f"it adds {count(cost.parameters)} {what}{share}")
    if cost.bytes:
        told.append(f"{size(cost.bytes)} are stored")
    if cost.fit_seconds:
        told.append(f"fitting took {duration(cost.fit_seconds)}")
    text = joined(told) if told else ""
    return [Sentence(f"{text[0].upper()}{text[1:]}.")] if text else []


def hints(method: Method, data: ReportData) -> list[Sentence]:
    """That a cheaper method does as well at calibration, if one does."""
    for other in cheaper_ones(method, data):
        found = [
            f"{figure_name(name)} {number(name, other.figures[name])} against "
            f"{number(name, method.figures[name])}"
            for name in ("ece", "nll")
            if name in with_verdict(other, BETTER) and as_good(other, method, name)
        ]
        if found:
            return [
                Sentence(
                    f"For calibration alone, {label(other)} costs less and does at least as well.",
                    joined(found),
                )
            ]
    return []


def _said(method: Method, name: str) -> str | None:
    found = method.verdicts.get(name)
    return found.verdict if found else None


def _tail(method: Method, base: Method, name: str) -> str:
    """A figure beside the reference's, with its verdict if it has one."""
    verdict = _said(method, name)
    told = (
        f"{figure_name(name)} {number(name, method.figures[name])} against "
        f"{number(name, base.figures[name])}"
    )
    return f"{told}: {verdict}" if verdict else told


def _both(method: Method, base: Method, name: str) -> bool:
    return name in method.figures and name in base.figures


def _mistakes(method: Method, base: Method) -> Sentence | None:
    if not _both(method, base, "accuracy"):
        return None
    mine, its = 100 - method.figures["accuracy"], 100 - base.figures["accuracy"]
    return Sentence(
        f"{plain(mine, 1)} mistakes in 100 predictions; {label(base)}: {plain(its, 1)}.",
        _tail(method, base, "accuracy"),
        _said(method, "accuracy"),
    )


def _confidence(method: Method, base: Method) -> Sentence | None:
    if not _both(method, base, "ece"):
        return None
    more = f"; {_tail(method, base, 'nll')}" if _both(method, base, "nll") else ""
    return Sentence(
        f"Its confidence is off by {plain(method.figures['ece'], 1)} percentage points; "
        f"{label(base)}: {plain(base.figures['ece'], 1)}.",
        _tail(method, base, "ece") + more,
        _said(method, "ece"),
    )


def _selective(method: Method, base: Method) -> Sentence | None:
    mine, its = at(method.risk_coverage, KEPT), at(base.risk_coverage, KEPT)
    if not _both(method, base, "aurc") or mine is None or its is None:
        return None
    return Sentence(
        f"Without its least confident {100 * (1 - KEPT):.0f}{PERCENT}, {plain(100 * mine, 1)} "
        f"mistakes in 100; {label(base)}: {plain(100 * its, 1)}.",
        _tail(method, base, "aurc"),
        _said(method, "aurc"),
    )


def _noticed(method: Method, base: Method, name: str) -> Sentence | None:
    figure = f"ood/{name}/msp/auroc"
    if not _both(method, base, figure) or name not in method.roc or name not in base.roc:
        return None
    mine, its = (at(m.roc[name], FALSE_ALARMS) or 0.0 for m in (method, base))
    return Sentence(
        f"It notices {100 * mine:.0f} of 100 inputs from {name}, at up to {100 * FALSE_ALARMS:.0f} "
        f"false alarms in 100 familiar ones; {label(base)}: {100 * its:.0f}.",
        _tail(method, base, figure),
        _said(method, figure),
    )


def missing(data: ReportData) -> list[str]:
    """What was not measured, and how to get it."""
    methods = data.methods
    wanted = (
        (data.ood, "No foreign inputs: give OOD datasets to the evaluation."),
        (len(methods) > 1, "No comparison: report on a run that has several methods."),
        (
            any(m.robustness for m in methods),
            "No curves over corruptions: measure them with abnn.robustness(...).",
        ),
        (
            any(m.samples_curve for m in methods),
            "No curve over the number of draws: measure it with bnn.samples_curve(...).",
        ),
        (
            any(m.fit for m in methods),
            "No losses of a fit: give the directory that abnn.fit wrote.",
        ),
        (
            any(m.trajectory for m in methods),
            "No ways of the modes: measure them with abnn.trajectory(...).",
        ),
        (
            any(m.disagreement for m in methods),
            "No disagreement of members: keep them when predicting.",
        ),
        (
            any(m.gallery for m in methods),
            "No inputs to look at: keep them, and their predictions, with the run.",
        ),
        (data.seeds, "No spread over seeds: report on several runs of the same methods."),
    )
    return [line for there, line in wanted if not there]
