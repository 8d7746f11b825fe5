import re
from itertools import pairwise

import numpy as np
import pytest

from rowmesh.placement import RowRange, TablePlan, TableShape
from rowmesh.placement.profile import TableProfile
from rowmesh.report.charts import bars, frequency_curve, heatmap


def planned(counts, *ranges):
    shape = TableShape("item", len(counts), 64, 64)
    return TablePlan(shape, ranges), TableProfile.of_counts(shape, counts)


def points(svg, level):
    (path,) = re.findall(rf'class="line {level}" d="M([^"]+)"', svg)
    return [tuple(map(float, point.split())) for point in path.split("L")]


def test_levels_join_and_fall():
    counts = np.arange(1000, 0, -1)
    svg = frequency_curve(*planned(counts, RowRange(0, 10, "replicated"), RowRange(10, 90, "node"), RowRange(90, 1000)))
    hot, warm, cold = (points(svg, level) for level in ("hot", "warm", "cold"))
    assert hot[-1][0] == pytest.approx(warm[0][0])
    assert warm[-1][0] == pytest.approx(cold[0][0])
    every = hot + warm + cold
    assert all(a[0] <= b[0] and a[1] <= b[1] for a, b in pairwise(every))
    assert 'class="rare' not in svg


def test_rows_in_no_order_are_drawn_sorted_in_the_colours_of_their_levels():
    counts = np.random.default_rng(0).permutation(np.arange(1, 1001))
    hot = set(np.flatnonzero(counts > 900).tolist())
    ranges = [RowRange(row, row + 1, "replicated" if row in hot else "cyclic") for row in range(1000)]
    svg = frequency_curve(*planned(counts, *ranges))
    first, then = points(svg, "hot"), points(svg, "cold")
    assert first[-1] == then[0]
    assert all(a[0] <= b[0] and a[1] <= b[1] for a, b in pairwise(first + then))


def test_the_row_of_rare_ids_is_a_dot_of_its_own():
    svg = frequency_curve(*planned([50, 20, 10, 1, 400], RowRange(0, 2, "replicated"), RowRange(2, 5)))
    assert svg.count('class="rare cold"') == 1
    assert "row 4, for all rare ids: 400 accesses" in svg


@pytest.mark.parametrize("counts", [[0, 0, 0], [7], [3, 0], [5, 5, 5], [1, 1]])
def test_odd_tables(counts):
    svg = frequency_curve(*planned(counts, RowRange(0, len(counts))))
    assert "nan" not in svg
    assert ("not read at all" in svg) == (max(counts) == 0)


def test_bars_end_at_the_scale_and_mark_what_goes_beyond():
    svg = bars([10.0, 20.0, 80.0], scale=40.0, texts=["ten", "twenty", "<eighty>"], limit=15.0)
    heights = [float(height) for height in re.findall(r'class="bar[^>]* height="([\d.]+)"', svg)]
    assert heights == pytest.approx([11.5, 23, 46])
    assert svg.count('class="bar over"') == 2
    assert "rank 2: &lt;eighty&gt;" in svg
    assert 'class="limit"' in svg
    assert 'class="limit"' not in bars([1.0], 1.0, ["one"])


@pytest.mark.parametrize("num_ranks", [4, 24])
def test_a_heatmap_shades_every_cell_by_its_bytes(num_ranks):
    matrix = np.random.default_rng(0).random((num_ranks, num_ranks)) * 100
    svg = heatmap(matrix, 100.0, num_ranks // 2, "links")
    opacity = np.zeros((num_ranks, num_ranks))
    cells = re.findall(r'x="(\d+)" y="(\d+)" width="1" height="1" fill-opacity="([\d.]+)"', svg)
    for x, y, value in cells:
        opacity[int(y), int(x)] = float(value)
    for value, path in re.findall(r'fill-opacity="([\d.]+)" d="([^"]+)"', svg):
        for x, y, width in re.findall(r"M(\d+) (\d+)h(\d+)", path):
            opacity[int(y), int(x) : int(x) + int(width)] = float(value)
    np.testing.assert_allclose(opacity, matrix / 100, atol=1 / 12 + 0.01)
    assert 'class="nodes"' in svg


def test_nothing_moves_where_the_scale_is_nothing():
    assert 'fill-opacity="0.00"' in heatmap(np.zeros((1, 1)), 0.0, 1, "none")
    assert 'height="0.00"' in bars([0.0], 0.0, ["none"])
