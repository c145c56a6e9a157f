"""The animations of the documentation: what they record, and what they draw."""

from xml.etree import ElementTree

import numpy as np
import pytest
from pages.motion import trajectories
from pages.motion.drawing import HEIGHT, WIDTH
from pages.motion.film import FLOOR, film
from support.tiers import tiers

from syncalgos.algorithms import ALGORITHMS

SVG = "{http://www.w3.org/2000/svg}"


DEFAULT_NAMES = ("sync_sgd", "streaming_diloco")  # with one leaf, and with two


@pytest.mark.parametrize("name", tiers(ALGORITHMS, DEFAULT_NAMES, slow=[]))
def test_every_algorithm_stays_in_a_picture_that_moves(name):
    recorded = trajectories.record_trajectories(name)
    pictured = film(recorded)
    for places in (pictured.workers, pictured.center):
        assert np.isfinite(places).all()
        assert (places > 0).all() and (places < [WIDTH, FLOOR]).all()
    assert recorded.syncs.any()

    text = trajectories.svg(recorded)
    root = ElementTree.fromstring(text)
    assert root.tag == f"{SVG}svg"
    assert root.get("viewBox") == f"0 0 {WIDTH} {HEIGHT}"
    assert [root[0].tag, root[1].tag] == [f"{SVG}title", f"{SVG}desc"]
    assert root.findall(f".//{SVG}animateTransform")
    assert not root.findall(f".//{SVG}script")
    assert len(text) < 45_000


@pytest.fixture(scope="module")
def averaged():
    return trajectories.record_trajectories("model_averaging")


def test_workers_agree_after_a_sync_alone(averaged):
    spread = np.ptp(averaged.places[1:], axis=1).max(axis=1)
    assert (spread[averaged.syncs] < 1e-6).all()
    assert (spread[~averaged.syncs] > 1e-3).all()
    assert [*np.flatnonzero(averaged.syncs)[:2]] == [7, 15]


def test_workers_of_sync_sgd_are_at_one_place():
    recorded = trajectories.record_trajectories("sync_sgd", steps=16)
    assert np.ptp(recorded.places, axis=1).max() == 0
    np.testing.assert_array_equal(recorded.center, recorded.places[:, 0])
    assert recorded.syncs.all()


def test_command_writes_the_pictures_that_are_named(tmp_path):
    trajectories.main(["--out", str(tmp_path / "made"), "sync_sgd"])
    assert [path.name for path in (tmp_path / "made").iterdir()] == ["sync_sgd.svg"]


def test_unknown_names_are_refused():
    with pytest.raises(ValueError, match="model_averaging"):
        trajectories.record_trajectories("model_averagin")
