"""What the demo tells: a table, pictures, and what follows from the numbers; 80 columns wide."""

from __future__ import annotations

import json
import math
import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from abnn.evaluate import Predictor

if TYPE_CHECKING:
    from abnn.demo.data import Data
    from abnn.demo.run import Row
    from abnn.demo.training import Candidate

SHADES = " ░▒▓█"


class Measure(NamedTuple):
    """A line of the table: its label there, its name in a sentence, its value, which is best."""

    label: str
    name: str
    form: str
    best: Callable[[list[float]], float] | None
    value: Callable[[Row], float]

    def text(self, row: Row) -> str:
        """The value as it is printed; equal in print is equal."""
        return format(self.value(row), self.form)

    def best_text(self, rows: Mapping[str, Row]) -> str | None:
        """The best value as it is printed; None where the question makes no sense."""
        if self.best is None:
            return None
        return format(self.best([self.value(row) for row in rows.values()]), self.form)


def _detection(data: str, figure: str) -> Callable[[Row], float]:
    return lambda row: float(getattr(row.evaluation.ood[data]["msp"], figure))


QUALITY = {
    "digits 0 to 7, {test} test images": [
        Measure("accuracy, %", "accuracy", ".1f", max, lambda row: row.evaluation.accuracy),
        Measure("negative log-likelihood", "NLL", ".3f", min, lambda row: row.evaluation.nll),
        Measure("calibration error, %", "calibration", ".1f", min, lambda row: row.evaluation.ece),
    ],
    "digits 8 and 9, never seen, {unseen} images": [
        Measure("AUROC, %", "AUROC on 8 and 9", ".1f", max, _detection("unseen", "auroc")),
        Measure("FPR95, %", "FPR95 on 8 and 9", ".1f", min, _detection("unseen", "fpr95")),
    ],
    "photographs, {photos} patches": [
        Measure("AUROC, %", "AUROC on photographs", ".1f", max, _detection("photos", "auroc")),
        Measure("FPR95, %", "FPR95 on photographs", ".1f", min, _detection("photos", "fpr95")),
    ],
}
COST = {
    "cost": [
        Measure("parameters added", "parameters", ",d", None, lambda row: row.parameters),
        Measure("training added, s", "training", ".1f", None, lambda row: row.seconds),
        Measure("1000 predictions, ms", "prediction", ".0f", None, lambda row: row.milliseconds),
    ],
}
MEASURES = [measure for group in QUALITY.values() for measure in group]


def table(rows: Mapping[str, Row], data: Data) -> str:
    """A column for every method; an asterisk marks the best of each line."""
    sizes = {"test": len(data.test[1]), "unseen": len(data.unseen), "photos": len(data.photos)}
    lines = [_line("", [f"{name} " for name in rows])]
    for title, measures in (QUALITY | COST).items():
        lines.append(title.format(**sizes))
        for measure in measures:
            best = measure.best_text(rows)
            cells = [measure.text(row) for row in rows.values()]
            marked = [f"{cell}{'*' if cell == best else ' '}" for cell in cells]
            lines.append(_line(f"  {measure.label}", marked))
    note = (
        "* the best. An image counts as unknown when its highest probability is low. AUROC tells "
        "how well this parts unknown images from known ones; FPR95 is the share of known images "
        "that is turned away where 95 % of the unknown ones are."
    )
    return "\n".join([*lines, "", textwrap.fill(note, 80)])


def _line(label: str, cells: Sequence[str]) -> str:
    return (f"{label:27}" + "".join(f"{cell:>13}" for cell in cells)).rstrip()


def pictures(single: Predictor, bnn: Predictor, data: Data) -> str:
    """The two test digits and the photograph on which the ABNN's members disagree most."""
    x, y = data.test
    digits = bnn.predict(x).epistemic.topk(2).indices
    photo = bnn.predict(data.photos).epistemic.topk(1).indices
    images = torch.cat([x[digits], data.photos[photo]])
    titles = [*(f"a {label}" for label in y[digits].tolist()), "a piece of a photograph"]
    columns = [
        [title, *blocks(image[0]), f"single: {_guesses(before)}", f"ABNN:   {_guesses(after)}"]
        for title, image, before, after in zip(
            titles, images, single.predict(images).probs, bnn.predict(images).probs, strict=True
        )
    ]
    lines = ["".join(f"{cell:27}" for cell in line).rstrip() for line in zip(*columns, strict=True)]
    title = "What the ABNN knows least about, and the two digits it might be:"
    return "\n".join([title, "", *lines])


def blocks(image: Tensor) -> list[str]:
    """An image `[H, W]` from 0 to 1 as lines of text, two characters a pixel.

    >>> blocks(torch.tensor([[0.1, 0.3, 1.0]]))
    ['  ░░██']
    """
    levels = (image * len(SHADES)).long().clamp(0, len(SHADES) - 1)
    return ["".join(2 * SHADES[level] for level in line) for line in levels.tolist()]


def _guesses(probs: Tensor) -> str:
    top = probs.topk(2)
    pairs = zip(top.indices.tolist(), top.values.tolist(), strict=True)
    return ", ".join(f"{label} {100 * p:.0f} %" for label, p in pairs)


def findings(
    rows: Mapping[str, Row],
    candidates: Sequence[Candidate],
    size: int,
    temperature: float,
) -> str:
    """What the numbers say, and what they do not.

    Args:
        rows: a row for every method.
        candidates: the fits that were tried.
        size: parameters of the network.
        temperature: that of temperature scaling.
    """
    single, bnn, ensemble = rows["single"], rows["ABNN"], rows["ensemble"]
    chosen = min(candidates, key=lambda candidate: candidate.nll)
    wins = sum(measure.text(ensemble) == measure.best_text(rows) for measure in MEASURES)
    moved = max(
        abs(measure.value(rows["temperature"]) - measure.value(single))
        for measure in MEASURES
        if "AUROC" in measure.name
    )
    accuracy = single.evaluation.accuracy
    error = math.sqrt(accuracy * (100 - accuracy) / single.evaluation.n)
    sentences = (
        f"{compare(single, bnn)} It adds {bnn.parameters:,} parameters to {size:,}, and takes "
        f"{bnn.milliseconds / single.milliseconds:.0f} times as long to predict.",
        f"The fit shown, out of {len(candidates)} tried, has lr {chosen.lr:g} and alpha "
        f"{chosen.alpha:g}, for the least NLL on validation images; it took {chosen.seconds:.1f} "
        "s, and all together the time in the table. This choice saw no unknown image; the demo's "
        "set-up itself was made while looking at such results of other seeds.",
        f"Temperature scaling (T = {temperature:.2f}) rescales confidence and never changes a "
        f"label; here it moved AUROC by {moved:.1f} at most.",
        f"The ensemble is the best in {wins} of {len(MEASURES)} lines, for "
        f"{ensemble.parameters // size} more networks to train, keep and run.",
        f"This is one seed and few images: accuracy alone has a standard error of {error:.1f} "
        "points, so take differences of that size for chance, and see other seeds. Noise was put "
        "on all images, since clean ones are too easy to tell the methods apart.",
    )
    return "\n".join(
        textwrap.fill(sentence, 80, initial_indent="- ", subsequent_indent="  ")
        for sentence in sentences
    )


def compare(single: Row, bnn: Row) -> str:
    """A sentence on what is better, worse and equal with the ABNN."""
    found: dict[str, list[str]] = {"better": [], "worse": [], "equal": []}
    for measure in MEASURES:
        before, after = measure.text(single), measure.text(bnn)
        if before == after:
            found["equal"].append(measure.name)
        else:
            won = after == measure.best_text({"single": single, "ABNN": bnn})
            found["better" if won else "worse"].append(f"{measure.name} ({before} to {after})")
    parts = [f"{verdict} in {', '.join(names)}" for verdict, names in found.items() if names]
    return f"Against the single network the ABNN is {'; '.join(parts)}."


def whereabouts(folder: Path, seed: int) -> str:
    """How to use the result in Python, and where everything is."""
    weights, modes = (json.dumps(str(folder / name)) for name in ("network.safetensors", "abnn"))
    return f"""\
Use it in Python:

    import abnn
    from abnn.demo import load_data, network
    from abnn.zoo import load_weights

    net = network()
    load_weights(net, {weights})
    bnn = abnn.load({modes}, net)
    prediction = bnn.predict(load_data(seed={seed}).photos[:5])
    print(prediction.label, prediction.confidence, prediction.epistemic)

Written to {folder}:

    report.html          all of it as a page; open it in a browser
    table.txt            this text
    results.json         all numbers
    network.safetensors  the network
    abnn/                its modes, and what the page shows
    demo-runs/           what another run goes on from; it can be deleted"""
