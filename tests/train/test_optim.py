import pytest

from normscale.config.schema import ScheduleConfig
from normscale.train.optim import learning_rate


def rates(steps: int = 20, **schedule: object) -> list[float]:
    return [learning_rate(ScheduleConfig(**schedule), 2.0, n, steps) for n in range(1, steps + 1)]


def test_warm_up_is_linear_and_reaches_the_peak() -> None:
    assert rates(warmup_steps=4)[:6] == pytest.approx([0.5, 1.0, 1.5, 2.0, 2.0, 2.0])


def test_without_warm_up_the_first_step_has_the_peak() -> None:
    for kind in ("constant", "inverse_sqrt"):
        assert rates(kind=kind)[0] == 2.0


def test_inverse_square_root() -> None:
    values = rates(kind="inverse_sqrt", warmup_steps=4)
    assert (values[3], values[15]) == pytest.approx((2.0, 1.0))


def test_cosine_ends_at_its_floor() -> None:
    values = rates(kind="cosine", warmup_steps=4, floor=0.1)
    assert values[3] == pytest.approx(2.0)
    assert values[11] == pytest.approx(1.1)
    assert values[-1] == pytest.approx(0.2)
    assert values == sorted(values[:4]) + sorted(values[4:], reverse=True)
