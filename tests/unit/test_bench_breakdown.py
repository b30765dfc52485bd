"""Where a step's time goes: the arithmetic, and the picture."""

import matplotlib.image
import pytest

from bench.breakdown import Breakdown, Traffic, covered, overlap, plot, split


@pytest.mark.parametrize(
    ("spans", "expected"),
    [
        ([], 0),
        ([(1, 3)], 2),
        ([(1, 3), (5, 6)], 3),
        ([(5, 6), (1, 3), (2, 4)], 4),  # |1──3|  |5─6|  and 2──4
        ([(1, 9), (2, 3), (4, 12)], 11),
    ],
)
def test_covered(spans, expected):
    assert covered(spans) == expected


def test_overlap():
    requests = [(0, 4), (6, 8)]
    operators = [(1, 2), (3, 7)]
    assert overlap(requests, operators) == 1 + 1 + 1
    assert overlap(requests, []) == 0


def test_a_step_is_compute_and_exposed():
    parts = split(0.10, 0.04, Traffic(busy_s=0.07, hidden_s=0.02), 0.03)
    assert parts == Breakdown(
        step_s=0.10,
        compute_s=0.04,
        exposed_s=pytest.approx(0.06),
        hidden_s=0.02,
        exposed_embedding_s=0.03,
        busy_s=0.07,
    )


def test_noise_makes_no_part_negative():
    parts = split(0.04, 0.05, Traffic(busy_s=0.09, hidden_s=0.06), None)
    assert (parts.compute_s, parts.exposed_s, parts.hidden_s) == (0.04, 0.0, 0.04)


def test_the_picture(tmp_path):
    common = {"model": "lm", "num_ranks": 4, "link": "1gbit"}
    records = [
        {**common, "method": "ddp", **vars(split(1.5, 0.5, Traffic(1.0, 0.1), None))},
        {**common, "method": "exact", **vars(split(0.15, 0.08, Traffic(0.1, 0.02), None))},
        {**common, "method": "embrace", **vars(split(0.1, 0.08, Traffic(0.1, 0.02), 0.05))},
    ]
    plot(records, tmp_path / "train.png")
    picture = matplotlib.image.imread(tmp_path / "train.png")
    assert picture.shape[0] > 300
    assert picture[..., :3].min() < 0.1 < picture[..., :3].max()
