"""Every figure looks as it did when somebody last looked at it."""

import numpy as np
import pytest
from helpers_reference import FOLDER, MEAN, WORST, difference, figures, picture
from matplotlib.figure import Figure
from matplotlib.image import imread

AGAIN = "look at the figure; if it is as it should be, run python tests/helpers_reference.py"


@pytest.fixture(scope="module")
def drawn():
    return dict(figures())


def test_every_figure_has_its_picture_and_every_picture_its_figure(drawn):
    assert {path.stem for path in FOLDER.glob("*.png")} == set(drawn), AGAIN


def test_figures_look_as_they_did(drawn):
    wrong = {}
    for name, image in drawn.items():
        reference = imread(FOLDER / f"{name}.png")[..., :3]
        if abs(np.subtract(reference.shape, image.shape)).max() > 1:
            wrong[name] = f"{image.shape} instead of {reference.shape}"
            continue
        height, width = np.minimum(reference.shape, image.shape)[:2]
        mean, worst = difference(image[:height, :width], reference[:height, :width])
        if mean > MEAN or worst > WORST:
            wrong[name] = f"mean {mean:.4f}, worst {worst:.3f}"
    assert wrong == {}, AGAIN


def test_a_moved_curve_a_lost_name_or_another_colour_is_seen_and_a_smoother_letter_is_not():
    def image(last=1.0, name="a name", colour="#0072b2", **options):
        figure = Figure(figsize=(8, 4))
        axes = figure.add_subplot()
        axes.plot([0, 1, 2], [0, 1, last], color=colour)
        axes.text(0.2, 0.8, name, **options)
        return picture(figure)

    for other in (image(last=0.9), image(name=""), image(colour="#d55e00")):
        mean, worst = difference(other, image())
        assert mean > MEAN or worst > WORST
    mean, worst = difference(image(antialiased=False), image())
    assert mean < MEAN
    assert worst < WORST
