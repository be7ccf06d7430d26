"""The records a run leaves, and the quantities they may hold: each registered once, with unit and reduction.

A spool is a file of JSON lines, one record a line. Every record has `kind`, `t` (milliseconds since 1970) and
`attempt` (1 for the first start of a run, 2 after the first restart, ...). The kinds:

- `start`    config, identity, environment, data facts, names of the rows of the profiles
- `metrics`  one attempted step: `step`, `applied` (optimizer steps applied so far), `values` {quantity: number}
- `profile`  one array over depth at one step: `step`, `name`, `data` (float32)
- `event`    something that happened once: `step`, `event`, further fields
- `ledger`   attempted steps that follow one another: `first`, `step` (the last), `columns` {`lr`, `norm`, ...: a list},
             `not_applied` {step: why}
- `end`      `outcome`, `exit_code`, `summary`

`step` counts attempted optimizer steps from 1; 0 is the state before training.
"""

from dataclasses import dataclass
from typing import Literal

ABOUT_AN_ATTEMPT = frozenset(
    (
        "resumed",
        "begun_anew",
        "preempted",
        "rank_lost",
        "pass_broken",
        "checkpoint_passed_over",
        "checkpoint_failed",
        "records_lost",
    )
)
"""Events that tell what became of one attempt; a later one that makes the step again does not unmake them. All others
are about the step itself, and the newest attempt that made it tells them."""

Reduction = Literal["sum", "max", "mean", "first"]
Outcome = Literal["finished", "nan", "error", "interrupted"]


@dataclass(frozen=True)
class Quantity:
    """One recorded scalar: its unit, how ranks combine it, and its key in MLflow (None: stays in the spool)."""

    name: str
    unit: str
    reduction: Reduction
    mlflow: str | None
    says: str


QUANTITIES: dict[str, Quantity] = {}


def quantity(name: str, unit: str, reduction: Reduction, mlflow: str | None, says: str) -> str:
    """Registers one scalar and returns its name.

    Raises:
        ValueError: the name is registered already (a mistake of ours).
    """
    if name in QUANTITIES:
        raise ValueError(f"quantity {name!r} is registered twice")
    QUANTITIES[name] = Quantity(name, unit, reduction, mlflow, says)
    return name


# Written once, at the end of a run (MLflow step 0).
quantity("gap", "nats", "first", "0-end/gap", "unigram entropy minus held-out loss at the end")
quantity("bleu", "BLEU", "first", "0-end/bleu", "sacrebleu's BLEU of held-out translations at the end")
quantity("grad_slope", "log/log", "first", "0-end/gslope", "slope of log gradient norm over log sublayer index")
quantity("grad_min_end", "1", "first", "0-end/gmin", "smallest sublayer gradient norm at the end")
quantity("bad_step", "steps", "first", "0-end/badstep", "first step with a non-finite loss or gradient, -1 none")
quantity("bad_layer", "sublayers", "first", "0-end/badlayer", "sublayer of the first non-finite gradient, -1 none")

quantity("update_end", "log10", "first", "0-end/update", "log10 of model update over learning rate, last measured step")
quantity("mfu", "1", "first", "0-end/mfu", "share of the device's peak that the model's FLOPs take in training steps")
quantity("peak_memory_bytes", "bytes", "max", "0-end/mem_MB", "peak memory, in MB there: of a GPU, else resident")

quantity("loss_train", "nats", "sum", "1-loss/train", "cross-entropy of the step's batch, per target")
quantity("loss_val", "nats", "sum", "1-loss/val", "cross-entropy on the held-out split, per target")
quantity("loss_gap", "nats", "sum", "1-loss/gap", "unigram entropy minus held-out loss")
quantity("logz_mean", "nats", "sum", "1-loss/logz", "mean over targets of log Z, the output softmax's normaliser")
quantity("logz_max", "nats", "max", "1-loss/logz_max", "largest log Z over the targets of the step")

quantity("nonfinite", "0/1", "max", "2-health/nonfinite", "1: a loss or gradient not finite, and not by the loss scale")
quantity("loss_scale", "1", "first", "2-health/loss_scale", "factor on the loss of the step (fp16 and fp8)")
quantity("skipped", "steps", "first", "2-health/skipped", "steps attempted but not applied, so far")
quantity("headroom", "bits", "max", "2-health/headroom", "least log2 of the largest number over an activation")
quantity("headroom_layer", "sublayers", "first", "2-health/headroom_layer", "sublayer that has the least headroom")
quantity("overflow_in", "steps", "first", "2-health/overflow_in", "steps until that headroom is used up, by a line")
quantity(
    "spike",
    "share",
    "first",
    "2-health/spike",
    "spike score: share of the losses so far over probes.spikes.sigmas (6) from those before",
)
quantity("spike_grad", "share", "first", "2-health/spike_grad", "the same of the gradient norms")

quantity("grad_norm", "1", "sum", "3-grad/norm", "global L2 norm of the gradient before clipping")
quantity("grad_norm_clipped", "1", "sum", "3-grad/clipped", "global L2 norm of the gradient after clipping")
quantity("grad_first", "1", "sum", "3-grad/first", "gradient norm of the first sublayer")
quantity("grad_last", "1", "sum", "3-grad/last", "gradient norm of the last sublayer")
quantity(
    "grad_last_out", "1", "sum", "3-grad/lastout", "gradient norm of the last feed-forward sublayer's output matrix"
)
quantity("grad_p50", "1", "sum", "3-grad/p50", "median over sublayers of the gradient norm")
quantity("grad_min", "1", "sum", "3-grad/min", "smallest gradient norm of a sublayer")
quantity("grad_max", "1", "sum", "3-grad/max", "largest gradient norm of a sublayer")
quantity("grad_argmin", "sublayers", "first", "3-grad/argmin_layer", "sublayer with the smallest gradient norm")
quantity("grad_argmax", "sublayers", "first", "3-grad/argmax_layer", "sublayer with the largest gradient norm")
quantity("grad_slope_now", "log/log", "first", "3-grad/slope", "slope of log gradient norm over log sublayer index")

quantity("stream_first", "1", "sum", "4-resid/first", "RMS of the residual stream after the first sublayer")
quantity("stream_last", "1", "sum", "4-resid/last", "RMS of the residual stream after the last sublayer")
quantity("stream_max", "1", "max", "4-resid/max", "largest absolute value of the residual stream over all sites")
quantity("branch_p50", "1", "sum", "4-resid/branch", "median over sites of the branch's RMS over the stream's")
quantity("stream_growth", "log/log", "sum", "4-resid/growth", "slope of log stream RMS over log site index")

quantity("update", "1", "sum", "5-update/drift", "norm of F(x, theta_t) - F(x, theta_0) on a fixed batch, per token")
quantity("update_rel_p50", "1", "first", "5-update/rel_p50", "median over sublayers of step over weights")
quantity("update_rel_max", "1", "first", "5-update/rel_max", "largest of a sublayer's step over its weights")

quantity("attn_logit_max", "1", "max", "6-attn/logit_max", "largest attention logit, of sampled queries")
quantity("attn_entropy_min", "nats", "sum", "6-attn/entropy_min", "least mean entropy of a site's attention")

quantity("eps_change_max", "1", "first", "7-eps/change_max", "largest change of a norm's output for ten times eps")
quantity("eps_share_max", "share", "first", "7-eps/share_max", "largest share of a norm's rows, eps over 1 % of var")
quantity("adam_eps_share", "share", "first", "7-adam/eps_share", "share of sublayers' entries with sqrt(v) < eps")

quantity("lr", "1", "first", "8-opt/lr", "learning rate of the step")
quantity("changed", "share", "first", "8-opt/changed", "share of the (sampled) parameters that the step changed")
quantity("tokens_s", "tokens/s", "sum", "8-opt/tokens_s", "training targets a second since the last record")
quantity("applied", "steps", "first", "8-opt/applied", "optimizer steps applied so far")

USER = "user/"
"""Scalars of another loop have names that begin so; what follows is theirs, and they are registered nowhere."""

PROBE_S = "_probe_s"
"""Ends the names, in a summary, of the seconds that a probe took for passes of its own; the probe's begins them."""

OF_TRAINERS = frozenset(
    (
        *("gap", "bleu", "grad_slope", "grad_min_end", "update_end", "mfu", "peak_memory_bytes"),
        *("loss_val", "loss_gap", "grad_last_out", "attn_logit_max", "attn_entropy_min", "changed", "tokens_s"),
    )
)
"""Quantities that the Trainer alone records: a run of another loop has none of them, at no time."""

MAX_KEYS = 80
"""Keys that one run has in MLflow at the most: with more, its charts take too long to open."""

TRAINED_NATS = 0.2
"""A run has trained when its held-out loss is this far below the unigram entropy. Knowing the byte before is worth
about 0.7 nats on English and on source text, so 0.2 takes context, and no sampling of the held-out text gives it.
Where the position alone is worth more (span corruption), the unigram entropy is that of each position."""

ROUNDING = 1e-9  # a value that is meant to be exactly at a threshold must not fall to either side by rounding


def has_trained(gap: float) -> bool:
    """Returns whether a run whose held-out loss ends this far below the unigram entropy has trained."""
    return gap >= TRAINED_NATS - ROUNDING


FEW_STEPS = 50
"""A run of fewer that is no better than token frequencies says nothing of whether it would train (empirical)."""


def too_few(outcome: str | None, steps: object) -> bool:
    """Returns whether a run ended at a plateau only because it made so few steps."""
    return outcome == "plateau" and isinstance(steps, int | float) and steps < FEW_STEPS


# Arrays over depth, in the `profile` records; rows are named in the start record (`rows`).
PROFILES: dict[str, str] = {
    "stream_rms": "RMS of the residual stream after each site; of several streams, the first",
    "other_stream_rms": "largest RMS of a scheme's other streams after each site",
    "stream_absmax": "largest absolute value of the stream after each site",
    "branch_rms": "RMS of each site's branch output, before it joins the stream",
    "branch_absmax": "largest absolute value of each site's branch output",
    "stream_nonfinite": "number of non-finite entries of the stream after each site",
    "branch_nonfinite": "number of non-finite entries of each site's branch output",
    "grad_norm": "L2 norm of the gradient of each sublayer's parameters (branch and norm), before clipping",
    "angle": "angle between what each block reads and leaves in the stream, over pi (rows are blocks, not sites)",
    "removal": "rise of the held-out loss without each block, NaN for one not tried (rows are blocks)",
    "stream_mean_share": "mean of the stream's entries, without its sign, over their RMS, after each site",
    "branch_ratio": "RMS of each site's branch over that of the stream after it (a monitor: of blocks, sampled rows)",
    "z_rms": "RMS of what each site normalises, alpha * residual + branch (Post-Norm family)",
    "z_absmax": "largest absolute value of what each site normalises",
    "z_nonfinite": "number of non-finite entries of what each site normalises",
    "stream_grad_norm": "L2 norm of the gradient of the global batch's mean loss by the stream after each site",
    "other_stream_grad_norm": "the same of a scheme's other streams, the largest of them",
    "stream_grad_absmax": "largest absolute value of the gradient by the stream",
    "stream_grad_nonfinite": "number of non-finite entries of the gradient by the stream",
    "headroom_bits": "bits to an overflow: log2 of a format's largest number over the largest of branch, stream and z",
    "update_rel": "length of the step over that of the weights, of each sublayer's parameters (an estimate above 2M)",
    "attn_logit_max": "largest attention logit of sampled queries, NaN at sites without attention",
    "attn_entropy": "mean entropy of the attention of sampled queries, in nats, NaN at sites without attention",
    "eps_up": "change of each norm's output for ten times eps, over its size (rows are norms: `norms`)",
    "eps_down": "the same for a tenth of eps (rows are norms)",
    "eps_share_1": "share of sampled rows where eps is over 1 % of the variance (rows are norms)",
    "eps_share_10": "share of sampled rows where eps is over 10 % of the variance (rows are norms)",
    "eps_gain_p50": "median of 1 / sqrt(var + eps), which multiplies gradients (rows are norms)",
    "eps_gain_max": "largest 1 / sqrt(var + eps) (rows are norms)",
    "eps_lost": "share of rows whose var + eps the compute precision would not hold (rows are norms)",
    "adam_eps_share": "share of each sublayer's entries with sqrt(v) < Adam's eps",
    "adam_eps_taken": "share of each sublayer's step that Adam's eps takes away",
    "angle_online": "angle between what each block reads and leaves, over pi, on sampled positions (rows are blocks)",
}
