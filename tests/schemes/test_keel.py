"""Keel: alpha by depth, the exceptions at the bottom, and an update that does not grow with depth."""

from typing import Any

import pytest
from torch import Tensor

from normscale.config.schema import ModelConfig
from normscale.errors import ConfigError
from normscale.models.plan import resolve
from normscale.schemes import Depth
from normscale.schemes.keel import Keel
from tests.schemes.test_theory import slopes
from tests.schemes.written import assert_unit_gains, branch, compare, constants, ln, made, norm, owned


@pytest.mark.parametrize("blocks", [1, 6, 18, 100, 1000])
def test_alpha_is_the_number_of_sublayers_after_the_first_block(blocks: int) -> None:
    for depth in (Depth(blocks, 0), Depth(0, blocks)):
        for scheme, alpha in ((Keel(), 2.0 * blocks), (Keel(Keel.Options(alpha=3.5)), 3.5)):
            found = [scheme.alpha(depth, site) for site in depth.sites()]
            assert found == [1.0, 1.0] + [alpha] * (2 * blocks - 2)


def stack_of(alpha: float | None) -> Any:
    """Without an alpha: the formula that has none."""

    def stack(layers: list[Any], ends: Any, x: Tensor, memory: Tensor | None) -> Tensor:
        for i, layer in enumerate(layers):
            out = branch(layer, ln(x, layer.own.norm))
            if i == 0:
                x = x + out
            elif i == 1 or alpha is None:
                x = ln(x + out, layer.own.out_norm)
            else:
                x = ln(alpha * x + out, layer.own.out_norm)
        return x

    return stack


@pytest.mark.parametrize(("N", "M"), [(4, 0), (0, 4)])
@pytest.mark.parametrize(("option", "alpha"), [(None, 8.0), (2.5, 2.5), (1.0, None)])
def test_the_stack_equals_its_formula(N: int, M: int, option: float | None, alpha: float | None) -> None:
    compare(made("keel", N, M, alpha=option), stack_of(alpha))


def test_what_it_owns_and_its_two_structures() -> None:
    assert_unit_gains(Keel())
    model = made("keel", 0, 3)
    assert constants(model, "alpha") == [None, 1.0, 6.0, 6.0, 6.0, 6.0]
    found = owned(model)
    assert found.pop("ends") == {}
    assert found.pop("decoder.0000.self") == norm("own.norm")
    assert found == {name: norm("own.norm") | norm("own.out_norm") for name in found}
    assert model.structures == 2


def test_its_first_update_is_depth_free_under_sgd_and_signs_and_without_alpha_it_grows() -> None:
    keel, without = slopes("keel"), slopes("keel-1")
    assert keel["sgd"] == pytest.approx(0.0, abs=0.1)
    assert keel["sign"] == pytest.approx(0.0, abs=0.1)
    assert without["sgd"] > 1.0
    assert without["sign"] > 1.0


def test_gradients_at_init_fall_as_one_over_depth_but_in_the_first_block() -> None:
    keel = slopes("keel")
    assert keel["first"] == pytest.approx(0.0, abs=0.05)
    assert keel["last"] == pytest.approx(-1.0, abs=0.03)
    assert slopes("post")["last"] == pytest.approx(0.0, abs=0.1)
    assert keel["variance"] == pytest.approx(0.0, abs=0.02)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"N": 2}, r"model.scheme: 'keel' has no encoder-decoder form"),
        ({"scheme_options": {"final_norm": True}}, r"scheme_options.final_norm: makes no sense with scheme=keel"),
        ({"scheme_options": {"alpha": 0.0}}, r"model.scheme_options.alpha: 0.0: .*greater than 0"),
    ],
)
def test_what_makes_no_sense_is_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        resolve(ModelConfig(**{"scheme": "keel"} | options))
