"""A user's own DeepSpeed JSON, read strictly: what it names is passed on as it is, agrees with ours, or is refused.

DeepSpeed itself passes over a top-level key that it does not know; a misspelt `gradient_cliping` would train with the
default. Here it is an error.
"""

import json
from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Final

from normscale.config.sources import plain
from normscale.errors import ConfigError

MAX_BYTES: Final = 2**20
AUTO: Final = "auto"  # DeepSpeed's word for a value that the program fills in

AGREED: Final = (
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
    "gradient_clipping",
    "communication_data_type",
    "bf16",
    "fp16",
    "zero_optimization",
    "zero_allow_untested_optimizer",
    "zero_force_ds_cpu_optimizer",
)
"""The keys that say what our configuration says, too."""

PASSED: Final = (
    "aio",
    "comms_logger",
    "disable_allgather",
    "disable_python_gc",
    "dump_state",
    "flops_profiler",
    "gradient_predivide_factor",
    "memory_breakdown",
    "prescale_gradients",
    "seq_parallel_communication_data_type",
    "steps_per_print",
    "timers",
    "wall_clock_breakdown",
)
"""The keys that are DeepSpeed's own affair."""

OURS: Final = {
    "optimizer": "train.optim says which one; remove the section",
    "scheduler": "train.schedule is the learning rate, by applied steps; remove the section",
    "amp": "precision.compute says it; remove the section",
    "torch_autocast": "precision.compute says it; remove the section",
    "data_types": "precision says it; remove the section",
    "bfloat16": "it is an old name; write bf16",
    "activation_checkpointing": "model.checkpointing=true does it; remove the section",
    "compile": "model.compile=true does it; remove the section",
    "gradient_allreduce_op": "gradients are averaged, and the loss is over the global batch; remove it",
    "managed_gradient_accumulation": "train.accumulate says where a window ends; remove it",
    "checkpoint": "checkpoint.every writes safetensors, DeepSpeed's format is never read back; remove the section",
    "tensorboard": "tracking keeps the records; remove the section",
    "wandb": "tracking keeps the records; remove the section",
    "csv_monitor": "tracking keeps the records; remove the section",
    "comet": "tracking keeps the records; remove the section",
    "curriculum_learning": "data draws the batches; remove the section",
    "data_efficiency": "data draws the batches; remove the section",
    "dataloader_drop_last": "data draws the batches; remove it",
}
"""Keys that another part of the configuration answers for, and what to do instead."""

ZERO: Final = (
    "stage",
    "offload_optimizer",
    "offload_param",
    "allgather_bucket_size",
    "allgather_partitions",
    "contiguous_gradients",
    "ignore_unused_parameters",
    "log_trace_cache_warnings",
    "overlap_comm",
    "reduce_bucket_size",
    "reduce_scatter",
    "stage3_allgather_sequential",
    "stage3_max_live_parameters",
    "stage3_max_reuse_distance",
    "stage3_model_persistence_threshold",
    "stage3_param_persistence_threshold",
    "stage3_prefetch_bucket_size",
    "stage3_use_all_reduce_for_fetch_params",
    "sub_group_size",
    "use_multi_rank_bucket_allreduce",
)
OFFLOAD: Final = ("device", "pin_memory", "pipeline_read", "pipeline_write", "buffer_count", "buffer_size")
FP16: Final = (
    "enabled",
    "auto_cast",
    "loss_scale",
    "initial_scale_power",
    "loss_scale_window",
    "hysteresis",
    "consecutive_hysteresis",
    "min_loss_scale",
)
"""Of a section that must be off: the others say nothing then, but a misspelt `enabled` would."""

FLAGS: Final = (
    "disable_allgather",
    "disable_python_gc",
    "dump_state",
    "memory_breakdown",
    "prescale_gradients",
    "wall_clock_breakdown",
)


def read(path: str) -> dict[str, Any]:
    """Returns what a DeepSpeed JSON holds.

    Raises:
        ConfigError: it cannot be read, holds a key twice, or one that is not known or not its own to say.
    """
    shown = plain(path, 200)
    found = read_object(path, f"engine.json: {shown}", "engine.json")
    _check_names(found, (*AGREED, *PASSED), "", shown)
    for name in ("bf16", "fp16", "zero_optimization"):
        if name in found and not isinstance(found[name], Mapping):
            raise _wrong(f"{name} is {_json(found[name])}, not a section, {{...}} ({shown})")
    zero = found.get("zero_optimization", {})
    _check_names(zero, ZERO, "zero_optimization.", shown)
    for name in ("offload_optimizer", "offload_param"):
        if not isinstance(zero.get(name, {}), Mapping):
            raise _wrong(f"zero_optimization.{name} is {_json(zero[name])}, not a section, {{...}} ({shown})")
        _check_names(zero.get(name, {}), OFFLOAD, f"zero_optimization.{name}.", shown)
    _check_names(found.get("bf16", {}), ("enabled", "immediate_grad_update"), "bf16.", shown)
    _check_names(found.get("fp16", {}), FP16, "fp16.", shown)
    _check_types(found, shown)
    return found


def named(found: Mapping[str, Any], dotted: str) -> Any:
    """Returns what a JSON says at a dotted place; None where it says nothing, or leaves it to us ("auto")."""
    value: Any = found
    for part in dotted.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return None if value == AUTO else value


def read_object(path: str, place: str, key: str | None = None) -> dict[str, Any]:
    """Returns the object of a DeepSpeed JSON file, whoever names it; `place` is what names it, and begins each message.

    Raises:
        ConfigError: of `key`: it cannot be read, is no JSON object, holds a key twice or a number that JSON has not.
    """

    def wrong(said: str) -> ConfigError:
        return ConfigError(f"{place}: {said}", key)

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for name, value in pairs:
            if name in found:
                raise wrong(f"{plain(name)} is given twice; remove one")
            found[name] = value
        return found

    def refuse(word: str) -> None:
        raise wrong(f"{word} is not a number of JSON; give a finite one")

    try:
        if not Path(path).is_file():
            raise wrong(f"{'not a file' if Path(path).exists() else 'no such file'}; give a DeepSpeed JSON")
        if (size := Path(path).stat().st_size) > MAX_BYTES:
            raise wrong(f"{size:,} bytes are too many for a configuration; give a DeepSpeed JSON")
        text = Path(path).read_text(encoding="utf-8")
        found = json.loads(text, object_pairs_hook=once, parse_constant=refuse)
    except OSError as error:
        raise wrong(f"cannot be read ({error.strerror}); give a DeepSpeed JSON") from error
    except (ValueError, RecursionError) as error:  # not JSON, or not text
        raise wrong(f"is not JSON ({plain(str(error))}); mend the file") from error
    if not isinstance(found, dict):
        raise wrong(f"is a {type(found).__name__}, not a JSON object; mend the file")
    return found


def _check_names(section: Mapping[str, Any], allowed: tuple[str, ...], prefix: str, shown: str) -> None:
    for name in section:
        if name in allowed:
            continue
        if not prefix and name in OURS:
            raise _wrong(f"{name} in {shown}: {OURS[name]}")
        close = get_close_matches(name, (*allowed, *(() if prefix else OURS)), n=1)
        guess = f"; did you mean {prefix + close[0]!r}?" if close else f"; remove it ({_few(allowed)} are)"
        raise _wrong(f"{plain(prefix + name)} in {shown} is nothing that normscale can hand on to DeepSpeed{guess}")


def _check_types(found: Mapping[str, Any], shown: str) -> None:
    """Raises where DeepSpeed, which checks no type at the top, would train wrongly or end at its first step."""
    for name in FLAGS:
        if not isinstance(found.get(name, False), bool) and found[name] != AUTO:
            raise _wrong(f"{name} is {_json(found[name])} in {shown}; give true or false")
    every = found.get("steps_per_print")
    if every not in (None, AUTO) and (type(every) is not int or every < 1):
        raise _wrong(f"steps_per_print is {_json(every)} in {shown}; give a whole number >= 1, or null")
    factor = found.get("gradient_predivide_factor", 1.0)
    if factor != AUTO and (type(factor) not in (int, float) or not 2.0**-24 <= factor <= 2.0**24):
        raise _wrong(f"gradient_predivide_factor is {_json(factor)} in {shown}; give the number of ranks, say")


def _few(names: tuple[str, ...]) -> str:
    return ", ".join(names[:4]) + (" and so on" if len(names) > 4 else "")


def _json(value: Any) -> str:
    return plain(json.dumps(value), 60)


def _wrong(said: str) -> ConfigError:
    return ConfigError(f"engine.json: {said}", key="engine.json")
