"""What may be seen of a model on its engine: by the probes, and of its precision."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from normscale.data.task import IGNORE, MicroBatch
from normscale.models.projection import Projection
from normscale.models.stack import Transformer
from normscale.norms import Norm, set_backend
from normscale.ops.backends import joined, noted
from normscale.ops.handles import Opening
from normscale.ops.products import Rounded
from normscale.probes.probe import SeeNorm, Subject
from normscale.probes.segments import SiteSquares
from normscale.schemes import Scheme
from normscale.train.denormals import flushed
from normscale.train.engines.engine import Engine
from normscale.train.engines.precision import DTYPES
from normscale.train.loop import summed_loss


def subject_of(engine: Engine) -> Subject:
    """Returns what the probes may look at of a model on its engine."""
    model, parameters, last_out = engine.inner, engine.parameters(), engine.output_matrix()
    squares = SiteSquares(parameters)
    passing = nullcontext if engine.joint is None else engine.joint.passing

    def features(inputs: Mapping[str, Tensor]) -> Tensor:
        with engine.aside() as quiet, passing():
            return quiet.features(**inputs)

    def streams_between(inputs: Mapping[str, Tensor]) -> list[list[Tensor]]:
        seen: list[Tensor] = []
        with engine.aside() as quiet, passing():
            quiet.features(**inputs, outputs=seen)
        encoder = seen[: model.depth.N + 1] if model.depth.N else []
        return [side for side in (encoder, seen[len(encoder) :]) if side]

    def loss(inputs: Mapping[str, Tensor], targets: Tensor, skip: int | None) -> tuple[Tensor, Tensor]:
        with engine.aside() as quiet:
            with passing():
                logits = quiet(**inputs, skip=skip)
            return summed_loss(logits, targets), (targets != IGNORE).sum()

    def see_norms(inputs: Mapping[str, Tensor], see: SeeNorm) -> None:
        with _norms_seen(model, see), _eager(model), engine.aside() as quiet, passing():
            quiet.features(**inputs)

    # fp8 products scale their operands one by one: what can overflow is the results, which are kept in bf16.
    computed = torch.finfo(DTYPES.get(engine.precision.compute, torch.bfloat16)).max
    kept = torch.finfo(DTYPES[engine.precision.stream]).max

    return Subject(
        sites=[site.name for site in model.sites()],
        streams=model.stream_count,
        width=model.d,
        device=engine.device,
        features=features,
        gradient_squares=lambda: squares(engine.gradients()),
        last_out_square=lambda: engine.squares([[last_out]]),
        streams_between=streams_between,
        loss=loss,
        see_norms=see_norms,
        parameters=parameters,
        combined=engine.combined,
        sums=model.scheme.sums,
        largest=computed,
        largest_stream=min(kept, computed) if type(model.scheme).read is Scheme.read else kept,
        largest_sum=kept,
    )


@contextmanager
def _norms_seen(model: Transformer, see: SeeNorm) -> Iterator[None]:
    """Lets `see` look at the input of every norm of the passes of the block; a fused norm would hide its own.

    What it raises is raised at the end: in the middle of a pass other ranks may wait for this one.
    """
    names = {module: name for name, module in model.named_modules() if isinstance(module, Norm) and module.spec}
    before = {module: module.backend for module in model.modules() if isinstance(module, Norm | Opening)}

    failed: list[Exception] = []

    def show(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        assert isinstance(module, Norm)
        try:
            if not failed:
                see(names[module], module, inputs[0])
        except Exception as error:
            failed.append(error)

    hooks = [module.register_forward_pre_hook(show) for module in names]
    try:
        set_backend(model, "eager")
        yield
    finally:
        for module, backend in before.items():
            module.backend = backend
        for hook in hooks:
            hook.remove()
    if failed:
        raise failed[0]


def precision_seen(engine: Engine, batch: MicroBatch) -> dict[str, str]:
    """Returns the dtypes that one forward pass really used, not the ones that were asked for.

    Where products are rounded (`simulated`), `compute` is the format, if the first product's result is in it.
    """
    seen: dict[str, str] = {}
    products = engine.products

    def note(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            tensor = output[0] if isinstance(output, tuple) else output
            dtype = str(tensor.dtype).removeprefix("torch.")
            if name == "compute" and isinstance(products, Rounded) and products.holds(tensor):
                dtype = products.format.dtype
            seen.setdefault(name, dtype)

        return hook

    sublayer = engine.inner.sublayers()[0]
    product = next(m for m in sublayer.modules() if isinstance(m, Projection))
    hooks = [product.register_forward_hook(note("compute")), sublayer.register_forward_hook(note("stream"))]
    try:
        with _eager(engine.inner), engine.aside() as model:
            model.features(**batch.to(engine.device).inputs)
    finally:
        for hook in hooks:
            hook.remove()
    seen |= engine.dtypes()
    seen["softmax"] = "float32"
    if products.softmax == "compute":
        seen["softmax"] = products.in_attention.dtype if isinstance(products, Rounded) else seen["compute"]
    seen["tf32"] = str(engine.device.type == "cuda" and torch.backends.cuda.matmul.allow_tf32).lower()
    seen["simulated"] = str(isinstance(products, Rounded)).lower()
    seen["flush_denormals"] = str(flushed() == "all").lower()
    return seen


def norms_seen(engine: Engine, batch: MicroBatch) -> str:
    """Returns what the norms of one forward pass ran on, not what was asked for."""
    asked = {module.backend for module in engine.inner.modules() if isinstance(module, Norm)}
    if engine.device.type == "cpu" and asked <= {"auto", "eager"}:
        return "eager"  # without a pass: it is all there is
    with noted() as ran, _eager(engine.inner), engine.aside() as model:
        model.features(**batch.to(engine.device).inputs)
    return joined(ran)


def _eager(model: Transformer) -> AbstractContextManager[Any]:
    """Returns a context in which a compiled model runs eagerly, so that hooks inside its blocks fire."""
    compiled = any("forward" in vars(block) for block in model.blocks)
    return torch.compiler.set_stance("force_eager") if compiled else nullcontext()
