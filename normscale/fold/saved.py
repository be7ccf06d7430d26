"""A folded model on disk, of no run: weights in safetensors, and in YAML all that is needed to build it.

folded-00000120/
    model.yaml           where it comes from; the model's configuration; its form (see `normscale.fold.Form`)
    weights.safetensors  by the names of the folded model's parameters
    fold.json            what the fold did, and how far it is from the run (`normscale.fold.run`)
"""

import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from normscale.config.schema import ModelConfig
from normscale.errors import BadInput, NormscaleError, StoreError
from normscale.fold import Form
from normscale.models.builder import build
from normscale.models.stack import Transformer
from normscale.tracking.files import try_lock

FORMAT = 1
MODEL, WEIGHTS = "model.yaml", "weights.safetensors"


@dataclass(frozen=True)
class Folded:
    """A folded model: the run and step it comes from, its vocabulary, configuration and form."""

    run: str
    step: int
    vocab: int
    config: ModelConfig
    form: Form


@contextmanager
def in_place_of(folder: Path) -> Iterator[Path]:
    """Gives an empty folder for the block, which takes the place of `folder` once the block has ended well.

    Raises:
        BadInput: another process is about to replace the same folder.
        StoreError: it cannot be written.
    """
    part = folder.with_name(f"{folder.name}.part")
    try:
        lock = try_lock(folder.with_name(f".{folder.name}.lock"))
        if lock is None:
            raise BadInput(f"{folder}: another process is writing it; start again when that one has ended")
        try:
            shutil.rmtree(part, ignore_errors=True)  # of a process that was killed
            part.mkdir()
            yield part
            shutil.rmtree(folder, ignore_errors=True)
            os.replace(part, folder)
        finally:
            shutil.rmtree(part, ignore_errors=True)
            os.close(lock)
    except OSError as error:
        raise StoreError(f"{folder}: cannot be written ({error.strerror}); make room, or the folder writable") from None


def save(folder: Path, folded: Folded, model: Transformer) -> None:
    """Writes a folded model, in fp32, into a folder that is there.

    Raises:
        StoreError: it cannot be written.
    """
    said = {"format": FORMAT, "run": folded.run, "step": folded.step, "vocab": folded.vocab}
    said |= {"model": folded.config.model_dump(mode="json"), "form": _lists(asdict(folded.form))}
    try:
        (folder / MODEL).write_text(yaml.safe_dump(said, sort_keys=False), encoding="utf-8")
        tensors = {name: tensor.detach().float().cpu().contiguous() for name, tensor in model.state_dict().items()}
        save_file(tensors, folder / WEIGHTS)
    except (OSError, SafetensorError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise StoreError(f"{folder}: cannot be written ({reason})") from None


def load(folder: Path) -> tuple[Transformer, Folded]:
    """Returns a folded model that `save` wrote, eager, on the CPU, in evaluation mode.

    Raises:
        BadInput: there is none, or it is not of the format that this version reads.
    """
    try:
        said = yaml.safe_load((folder / MODEL).read_text(encoding="utf-8"))
        weights = load_file(folder / WEIGHTS)
    except OSError as error:
        raise BadInput(f"{folder}: no folded model can be read ({error.strerror}); make one: normscale fold") from None
    except (yaml.YAMLError, SafetensorError, UnicodeDecodeError) as error:
        raise BadInput(f"{folder}: not a folded model ({type(error).__name__})") from None
    try:
        folded = _read(said)
        model = build(folded.config, folded.vocab, 0)
        folded.form.put_on(model)
        model.load_state_dict(weights)
    except (KeyError, TypeError, ValueError, AttributeError, RuntimeError, ValidationError, NormscaleError) as error:
        raise BadInput(f"{folder}: not of the format that this version reads ({type(error).__name__})") from None
    return model.eval(), folded


def _read(said: Mapping[str, Any]) -> Folded:
    if said["format"] != FORMAT:
        raise ValueError(said["format"])
    form: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in said["form"].items()}
    config = ModelConfig.model_validate(said["model"])
    return Folded(said["run"], said["step"], said["vocab"], config, Form(**form))


def _lists(form: Mapping[str, Any]) -> dict[str, Any]:
    return {name: list(value) if isinstance(value, tuple) else value for name, value in form.items()}
