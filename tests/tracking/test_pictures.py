import numpy as np
import pytest

from normscale.tracking import pictures
from normscale.tracking.pictures import HEIGHT, WIDTH, heat, limits, profile

MAGENTA = np.array([255, 0, 255])


def share_of_magenta(picture):
    return float((np.abs(picture.astype(int) - MAGENTA).max(axis=2) < 8).mean())


@pytest.mark.parametrize(("rows", "steps"), [(1, 1), (2, 3), (24, 1), (2000, 30)])
def test_any_size_gives_a_readable_picture(rows, steps):
    data = np.exp(np.random.default_rng(0).normal(size=(steps, rows))).astype(np.float32)
    span = limits([data])
    for picture in (heat(list(range(1, steps + 1)), data, "x", span), profile(data[-1], "x", span, steps)):
        assert picture.shape == (HEIGHT, WIDTH, 3)
        assert picture.dtype == np.uint8
        assert len(np.unique(picture[::5, ::5].astype(int) @ [65536, 256, 1])) > 2, "not an empty sheet"
        assert share_of_magenta(picture) == 0


def test_one_bad_value_among_thousands_is_seen():
    data = np.ones((30, 2000), dtype=np.float32)
    data[17, 1234] = np.nan
    steps = list(range(0, 300, 10))
    assert share_of_magenta(heat(steps, data, "x", (0.1, 10.0))) > 0
    data[17, 1234] = np.inf
    assert share_of_magenta(heat(steps, data, "x", (0.1, 10.0))) > 0
    assert share_of_magenta(profile(data[17], "x", (0.1, 10.0), 170)) > 0


def test_a_bad_step_among_thousands_is_seen():
    data = np.ones((3000, 4), dtype=np.float32)
    data[1001] = np.nan
    assert share_of_magenta(heat(list(range(3000)), data, "x", (0.1, 10.0))) > 0


def test_a_bad_last_step_is_seen_where_the_run_ended():
    data = np.ones((30, 4), dtype=np.float32)
    data[-1] = np.nan
    picture = heat(list(range(0, 300, 10)), data, "x", (0.1, 10.0))
    assert share_of_magenta(picture) > 0.01
    assert share_of_magenta(picture[:, : WIDTH // 2]) == 0


def test_a_bad_profile_has_the_last_good_one_behind_it():
    bad = np.full(8, np.nan, np.float32)
    alone = profile(bad, "x", (0.1, 10.0), 7)
    both = profile(bad, "x", (0.1, 10.0), 7, bad_row=2, before=(5, np.ones(8, np.float32)))
    grey = (np.abs(both.astype(int) - 0x99).max(axis=2) < 4).sum() - (
        np.abs(alone.astype(int) - 0x99).max(axis=2) < 4
    ).sum()
    assert grey > 200
    assert share_of_magenta(both) > share_of_magenta(alone) > 0


def test_a_bad_value_between_records_is_marked_at_its_layer():
    data = np.ones((10, 8), dtype=np.float32)
    plain = heat(list(range(0, 100, 10)), data, "x", (0.1, 10.0))
    low = heat(list(range(0, 100, 10)), data, "x", (0.1, 10.0), [(45, 0)])
    late = heat(list(range(0, 100, 10)), data, "x", (0.1, 10.0), [(145, None)])
    assert share_of_magenta(plain) == 0
    assert share_of_magenta(low[HEIGHT // 2 :, : WIDTH * 2 // 3]) > 0
    assert share_of_magenta(low[: HEIGHT // 2]) == 0
    assert share_of_magenta(late[: HEIGHT // 4, WIDTH * 2 // 3 :]) > 0


def test_what_is_flat_lies_in_the_middle_of_the_range():
    for value in (1.0, 0.99999, 3e-7, 7.0):
        low, high = limits([np.full((2, 5), value, np.float32)])
        assert 0.2 < (np.log10(value) - np.log10(low)) / (np.log10(high) - np.log10(low)) < 0.8


def test_colours_are_the_same_in_every_picture_and_depth_grows_upwards():
    low, high = np.full((2, 4), 1e-3, np.float32), np.full((2, 4), 1e1, np.float32)
    span = limits([low, high])
    assert span[0] <= 1e-3
    assert span[1] >= 10
    middle = (HEIGHT // 2, WIDTH // 2 - 100)
    dark, bright = heat([1, 2], low, "x", span)[middle], heat([1, 2], high, "x", span)[middle]
    assert int(bright.sum()) > int(dark.sum()) + 150
    rising = np.tile(np.array([1e-3, 1e-3, 1e1, 1e1], np.float32), (2, 1))
    picture = heat([1, 2], rising, "x", span)
    assert (picture[100, WIDTH // 2 - 100] == bright).all()
    assert (picture[400, WIDTH // 2 - 100] == dark).all()


def test_the_range_ignores_what_is_not_finite_or_not_positive():
    data = np.array([[np.nan, np.inf, -np.inf, 0.0, -1.0, 2.0, 300.0]], np.float32)
    assert limits([data]) == (1.0, 1000.0)
    assert limits([]) == limits([np.full((1, 3), np.nan, np.float32)]) == (0.1, 10.0)
    picture = heat([5], np.zeros((1, 3), np.float32), "x", (0.1, 10.0))
    assert share_of_magenta(picture) == 0, "zero is the lowest colour, not a fault"
    assert share_of_magenta(heat([5], np.full((1, 3), np.nan, np.float32), "x", (0.1, 10.0))) > 0.4


def test_uneven_steps_keep_their_place():
    data = np.array([[1e-3], [1e1]], np.float32)
    picture = heat([0, 900, 1000], np.concatenate([data[:1], data[:1], data[1:]]), "x", (1e-3, 1e1))
    row = picture[HEIGHT // 2]
    assert (row[WIDTH // 2 - 100] == row[200]).all(), "nine tenths of the steps are the low value"


def test_a_picture_of_its_own_range_has_no_empty_decades():
    flat, steep = np.linspace(1.2, 2.6, 16), np.logspace(-4, 1.5, 16)
    (low, high), logs = pictures._own_span([flat])
    assert (low, logs) == (0.0, False)
    assert 2.6 < high < 4
    span, logs = pictures._own_span([np.append(steep, np.nan)])
    assert span == pytest.approx((1e-4, 1e2))
    assert logs
    assert pictures._own_span([np.full(3, np.nan)]) == ((0.0, 1.0), False)
    for values in (flat, steep, np.full(16, np.nan), np.zeros(16), np.ones(1)):
        assert pictures.profile(values, "stream RMS", None, 3, 0, (1, values + 1), "decoder.0000.self").size
