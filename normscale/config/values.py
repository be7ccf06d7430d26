"""What a configuration's sections are made of: kinds of values, and the errors of combinations."""

import math
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field
from pydantic_core import PydanticCustomError

LARGEST_FP32 = (2 - 2**-23) * 2.0**127
OPTION_DEPTH = 16  # levels of nesting in scheme_options and norm_options; far more than any scheme needs


def says(text: str, source: str = "") -> Any:
    """Returns the one-line help of a field and, for an idea of somebody's, where it is from: `normscale explain`."""
    return Field(description=text, json_schema_extra={"source": source} if source else None)


def conflict(said: str, *keys: str) -> PydanticCustomError:
    """Returns the error of a combination: what is said after the first key, and every key that takes part."""
    return PydanticCustomError("conflict", "{said}", {"said": said, "keys": keys})


def unused(key: str, value: object, has: str, mend: str | None) -> PydanticCustomError:
    """Returns the error of a value that nothing would read because another key (`has`, as key=value) is as it is.

    `mend` is what to set for the value to be read, None where nothing else in the configuration could change that.
    """
    shown = "null" if value is None else value
    mended = f" or set {mend}" if mend else ""
    return conflict(f"{shown} would do nothing with {has}; remove it{mended}", key, has.partition("=")[0])


def _not_a_flag(value: Any) -> Any:
    if isinstance(value, bool):  # Python counts True as 1; a configuration does not
        raise PydanticCustomError("flag_for_number", "a number is wanted")
    return value


def _plain(value: Any, depth: int = 0) -> Any:
    """Returns `value` when it is made of what JSON and YAML can both hold: a run's identity is hashed from it."""
    if depth > OPTION_DEPTH:
        raise conflict(f"nested more than {OPTION_DEPTH} levels deep; options are flat or nearly so")
    if isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str):
                raise conflict(f"the option name {key!r} is not text; put it in quotes")
            _plain(key, depth + 1)
            _plain(item, depth + 1)
    elif isinstance(value, list | tuple):
        for item in value:
            _plain(item, depth + 1)
    elif isinstance(value, str):
        if any(0xD800 <= ord(letter) < 0xE000 for letter in value):
            raise conflict("holds half a Unicode character, which cannot be written to a file")
    elif isinstance(value, float) and not math.isfinite(value):
        raise conflict(f"holds {value}; only finite numbers can be recorded")
    elif not isinstance(value, bool | int | float | None):
        raise conflict(f"holds a {type(value).__name__}; use text, numbers, true, false, null, lists and mappings")
    return value


def _fp32(value: float) -> float:
    if abs(value) > LARGEST_FP32:
        raise conflict(f"fp32, which parameters are made in, ends at {LARGEST_FP32:.3g}; give less")
    return value


Whole = Annotated[int, BeforeValidator(_not_a_flag)]
Number = Annotated[float, BeforeValidator(_not_a_flag)]
Flag = Annotated[bool, Field(strict=True)]
Text = Annotated[str, Field(min_length=1, pattern=r"^[^\x00-\x1f\x7f]+$")]
Options = Annotated[dict[Any, Any], AfterValidator(_plain)]

Positive = Annotated[Number, Field(gt=0)]
Fp32 = Annotated[Number, AfterValidator(_fp32)]
NonNegative = Annotated[Number, Field(ge=0)]
Share = Annotated[Number, Field(ge=0, lt=1)]
Count = Annotated[Whole, Field(ge=1, le=10**12)]
CountOrZero = Annotated[Whole, Field(ge=0, le=10**12)]
Blocks = Annotated[Whole, Field(ge=0, le=10**4)]  # ten times the deepest published; even a plan visits each


class Section(BaseModel):
    """Base of every section: immutable, and a key it does not know is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True, allow_inf_nan=False)
