"""Every figure looks as it did when somebody last looked at it."""

import numpy as np
import pytest
from helpers_reference import FOLDER, MEAN, WORST, difference, figures
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
