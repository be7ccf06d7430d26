"""Group norm: each head's channels by themselves."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from normscale.config.schema import ModelConfig
from normscale.errors import ConfigError
from normscale.models.builder import build
from normscale.models.plan import resolve
from tests.norms.made import made

X = torch.randn(2, 3, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
SIZE = {"M": 1, "d": 24, "heads": 3, "context": 8}


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_it_is_group_norm_of_every_token(groups: int) -> None:
    norm = made("groupnorm", groups=groups, eps=0.1).double()
    with torch.no_grad():
        norm.gamma.mul_(1.5)
        norm.bias.add_(0.3)
    want = F.group_norm(X.view(6, 8), groups, norm.gamma, norm.bias, 0.1).view(2, 3, 8)
    torch.testing.assert_close(norm(X), want)


def test_one_group_is_a_layernorm_and_heads_do_not_see_each_other() -> None:
    torch.testing.assert_close(made("groupnorm", groups=1).double()(X), made("layernorm").double()(X))
    norm, changed = made("groupnorm").double(), X.clone()  # of two heads
    changed[..., :4] *= torch.arange(1.0, 5.0)
    assert torch.equal(norm(changed)[..., 4:], norm(X)[..., 4:])


def test_groups_are_as_many_as_heads_unless_stated() -> None:
    for options, groups in (({}, 3), ({"norm_options": {"groups": 2}}, 2)):
        model = build(ModelConfig(**SIZE, norm="groupnorm", **options), 32, 0)
        assert {m.groups for m in model.modules() if hasattr(m, "groups")} == {groups}
        numerical = resolve(ModelConfig(**SIZE, norm="groupnorm", **options)).numerical()
        assert numerical["norm_options"]["groups"] == groups


@pytest.mark.parametrize(
    ("options", "key"),
    [
        ({"norm": "groupnorm", "norm_options": {"groups": 5}}, "model.norm_options.groups"),
        ({"norm": "groupnorm", "norm_options": {"groups": 24}}, "model.norm_options.groups"),
        ({"norm": "groupnorm", "qk_norm": "head"}, "model.norm_options.groups"),
        (
            {"norms": {"ffn": {"norm": "groupnorm", "norm_options": {"groups": 5}}}},
            "model.norms.ffn.norm_options.groups",
        ),
    ],
)
def test_groups_that_make_nothing_of_a_width_are_refused(options: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError, match=rf"^{key}: \d+ groups make nothing of a norm over \d+ channels") as caught:
        resolve(ModelConfig(**SIZE, **options))
    assert caught.value.key == key
