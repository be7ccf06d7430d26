"""The kernels' formulas in PyTorch: what the registered operations run for CPU tensors where nothing is interpreted.

Models on a CPU do not come here (they call the eager definitions). It lets a graph with the operations be traced,
compiled and checked without a GPU, and it is the shortest account of what the kernels compute. GPU tensors come here
for the gradient of a trained alpha in wide rows (see `launch.backward_plan`).
"""

import torch
from torch import Tensor

from normscale.ops.launch import Gradients, Inputs, Wanted
from normscale.ops.philox import keep_mask, keep_scale
from normscale.ops.statistics import statistics


def forward(
    inputs: Inputs,
    bias: Tensor | None,
    y: Tensor,
    z: Tensor | None,
    moments: Tensor,
    z_partials: Tensor | None,
    y_partials: Tensor | None,
) -> None:
    """Fills y, z, moments and partials; arguments as `launch.forward_call`."""
    total, _ = _sum(inputs, moments.dtype)
    if z is not None:
        total = z.copy_(total).to(moments.dtype)
    if inputs.spec.kind == "layernorm":
        mean = total.mean(-1)
        shift = (total - mean[:, None]).mean(-1)
        centre = (total - mean[:, None]) - shift[:, None]
        moments[0], moments[1] = mean, shift
    else:
        centre = total
    variance = centre.square().mean(-1)
    moments[-1] = torch.where(variance < torch.inf, torch.rsqrt(variance + inputs.spec.eps), torch.nan)
    normalised = centre * moments[-1, :, None]
    gain = _gain(inputs, moments.dtype)
    out = normalised if gain is None else normalised * gain
    y.copy_(out if bias is None else out + bias)
    _measure(z_partials, total)
    _measure(y_partials, y)


def backward(inputs: Inputs, gradients: Gradients, moments: Tensor, wanted: Wanted) -> None:
    """Fills what is wanted; partial sums in their first row. Arguments as `launch.backward_calls`."""
    work = moments.dtype
    total, residual = _sum(inputs, work)
    dy = gradients.dy.to(work)
    if gradients.dhandle is not None and gradients.next_alpha is not None:
        dy = dy + gradients.next_alpha.to(work) * gradients.dhandle.to(work)
    if inputs.spec.kind == "layernorm":
        total = (total - moments[0, :, None]) - moments[1, :, None]
    normalised = total * moments[-1, :, None]
    if wanted.dgamma is not None:
        _sum_rows(wanted.dgamma, dy * normalised)
    if wanted.dbias is not None:
        _sum_rows(wanted.dbias, dy)
    if wanted.dx is None and wanted.dresidual is None and wanted.dalpha is None and wanted.dz_partials is None:
        return
    gain = _gain(inputs, work)
    g = dy if gain is None else dy * gain
    dz = g - normalised * (g * normalised).mean(-1, keepdim=True)
    if inputs.spec.kind == "layernorm":
        dz = dz - g.mean(-1, keepdim=True)
    dz = dz * moments[-1, :, None]
    if gradients.dz is not None:
        dz = dz + gradients.dz.to(work)
    _measure(wanted.dz_partials, dz)
    if wanted.dalpha is not None:
        _sum_rows(wanted.dalpha, dz * residual)
    if wanted.dresidual is not None:
        scaled = wanted.scale_residual and inputs.alpha is not None
        wanted.dresidual.copy_(dz * inputs.alpha.to(work) if scaled and inputs.alpha is not None else dz)
    if wanted.dx is not None:
        keep = _keep(inputs)
        wanted.dx.copy_(dz if keep is None else torch.where(keep, dz * keep_scale(inputs.dropout), 0.0))


def _sum_rows(partials: Tensor, rows: Tensor) -> None:
    if partials.shape[0]:
        partials.zero_()
        partials[0] = rows.sum(0)


def _sum(inputs: Inputs, work: torch.dtype) -> tuple[Tensor, Tensor]:
    """Returns z and the residual, z = x where there is none."""
    keep = _keep(inputs)
    total = inputs.x.to(work)
    if keep is not None:
        total = torch.where(keep, total * keep_scale(inputs.dropout), 0.0)
    if inputs.residual is None:
        return total, total
    residual = inputs.residual.to(work)
    return (total + residual if inputs.alpha is None else total + inputs.alpha.to(work) * residual), residual


def _keep(inputs: Inputs) -> Tensor | None:
    if inputs.dropout == 0 or inputs.seed is None:
        return None
    return keep_mask(inputs.seed, inputs.x.shape, inputs.dropout)


def _gain(inputs: Inputs, work: torch.dtype) -> Tensor | None:
    if inputs.gamma is None:
        return None
    return inputs.gamma.to(work) + 1.0 if inputs.spec.zero_centred else inputs.gamma.to(work)


def _measure(partials: Tensor | None, x: Tensor) -> None:
    if partials is not None and partials.shape[0]:
        x = x.float()
        nan = x.isnan()
        measured = statistics(torch.where(nan, 0.0, x))
        partials.zero_()
        partials[0, :2] = measured[:2]
        partials[0, 2] = measured[2] + nan.sum()
        partials[0, 3] = nan.sum()
