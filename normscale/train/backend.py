"""What the norms of a model would run on, before it is built."""

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from normscale.config.precision import PrecisionConfig
from normscale.config.schema import ModelConfig
from normscale.models.plan import Plan
from normscale.models.skeleton import skeleton, without_values
from normscale.norms import Norm
from normscale.ops.backends import described, joined, would_run
from normscale.ops.handles import Opening
from normscale.ops.spec import NormSpec
from normscale.train.engines.precision import casting, products_of, settle


def norm_backend(plan: Plan, precision: PrecisionConfig, device: str) -> str:
    """Returns what the norms run on, on a kind of device, as a run's record says it.

    Raises:
        BackendError: `model.backend` names one that cannot run one of the norms.
    """
    backend = plan.config.backend
    if backend == "eager" or (backend == "auto" and device != "cuda"):
        return "eager"
    met = _met(plan.config.model_dump_json(), precision.model_dump_json(), device)
    runs = (
        would_run(backend, "norm", one.spec, one.width, one.dtype, device, _weight(one.gamma), _weight(one.bias))
        for one in met
    )
    return joined({described(*run) for run in runs})


@dataclass(frozen=True)
class _Met:
    """What a norm is asked to do: its spec, the width and dtype of what it norms, the dtypes of its weights."""

    spec: NormSpec | None
    width: int
    dtype: torch.dtype
    gamma: torch.dtype | None
    bias: torch.dtype | None


def _weight(dtype: torch.dtype | None) -> Tensor | None:
    return None if dtype is None else torch.empty(0, dtype=dtype, device="meta")


@cache
def _met(model_json: str, precision_json: str, device: str) -> tuple[_Met, ...]:
    """Returns what the norms of a model meet in a pass, each once: a plan of many runs asks for the same again.

    Widths and dtypes are a matter of the scheme, of branches and of autocast: a few blocks of the model itself are
    run, on tensors without values.
    """
    config, precision = ModelConfig.model_validate_json(model_json), PrecisionConfig.model_validate_json(precision_json)
    rounds = config.backend in ("apex", "liger")
    found: dict[_Met, None] = {}
    model = skeleton(config.model_copy(update={"compile": False}), vocab=1).model
    products = products_of(precision, device)
    with FakeTensorMode(), torch.no_grad(), casting(precision, products, "cpu"):
        without_values(model).eval()
        settle(model, precision, products)
        for module in model.modules():
            if isinstance(module, Norm):
                module.backend_for = _Asked(module, rounds, found)  # type: ignore[method-assign]
            if isinstance(module, Norm | Opening):
                module.backend = "eager"
        token = torch.zeros(1, 1, dtype=torch.int64)
        source = token if model.source_ends is not None else None
        model.features(token, source_BS=source, segments_BT=token if model.segment is not None else None)
    return tuple(found)


@dataclass(frozen=True)
class _Asked:
    """Takes the place of a norm's `backend_for`: notes what it is asked, and has the definition run.

    Where another package's norm would take a sum, it `rounds` it to the stream's dtype first (see `Norm.residual`).
    """

    norm: Norm
    rounds: bool
    found: dict[_Met, None]

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> str:
        dtype = x.dtype if residual is None else torch.promote_types(x.dtype, residual.dtype)
        gamma, bias = (None if w is None else w.dtype for w in (self.norm.gamma, self.norm.bias))
        self.found[_Met(self.norm.spec, x.shape[-1], dtype, gamma, bias)] = None
        return "another's" if residual is not None and self.rounds else "eager"
