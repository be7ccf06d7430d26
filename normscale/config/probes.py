"""The `probes` section: what is measured, and how often."""

from typing import Annotated

from pydantic import Field, model_validator

from normscale.config.values import (
    Count,
    CountOrZero,
    Flag,
    Number,
    Positive,
    Section,
    Whole,
    conflict,
    says,
    unused,
)


class UpdateProbeConfig(Section):
    """The model-update probe: where F(x, theta_t) - F(x, theta_0) is measured; no steps and no interval: nowhere."""

    steps: Annotated[tuple[Count, ...], says("where the model update is measured, rising; []: nowhere")] = ()
    every: Annotated[CountOrZero, says("steps between model updates, and one at the last; 0: at steps alone")] = 0
    sequences: Annotated[Count, says("sequences of the fixed batch it is measured on")] = 4

    @model_validator(mode="after")
    def _combinations(self) -> "UpdateProbeConfig":
        for before, after in zip(self.steps, self.steps[1:], strict=False):
            if after <= before:
                raise conflict(f"{after} comes after {before}; steps must rise", "probes.update.steps")
        if not self.steps and not self.every and self.sequences != 4:
            raise unused("probes.update.sequences", self.sequences, "probes.update.steps=[]", "probes.update.steps")
        return self


class EpsilonProbeConfig(Section):
    """What epsilon does in every norm, and Adam's in every sublayer; it costs a forward pass over one batch."""

    every: Annotated[CountOrZero, says("steps between measurements, and one at the last; 0: never")] = 0
    rows: Annotated[Count, says("rows of each norm's input that are looked at, in fp64")] = 64

    @model_validator(mode="after")
    def _combinations(self) -> "EpsilonProbeConfig":
        if not self.every and self.rows != 64:
            raise unused("probes.epsilon.rows", self.rows, "probes.epsilon.every=0", "probes.epsilon.every")
        return self


Several = Annotated[Whole, Field(ge=2, le=10**6)]
Beam = Annotated[Whole, Field(ge=1, le=1000)]
Penalty = Annotated[Number, Field(ge=0, le=10)]


class SpikesConfig(Section):
    """What counts as a spike of the loss and of the gradient norm."""

    sigmas: Annotated[Positive, says("standard deviations from the mean of the steps before")] = 6.0
    window: Annotated[Several, says("steps before that mean and deviation are taken over")] = 128


class TranslationConfig(Section):
    """Held-out lines that are translated at the end, by beam search, and scored by BLEU."""

    sentences: Annotated[CountOrZero, says("translation only: held-out lines translated at the end; 0: none")] = 0
    beam: Annotated[Beam, says("sequences that the search follows; even 1 goes on past a likely end")] = 5
    penalty: Annotated[Penalty, says("log-probabilities are taken over the length to this power")] = 1.0

    @model_validator(mode="after")
    def _combinations(self) -> "TranslationConfig":
        for name in ("beam", "penalty"):
            value = getattr(self, name)
            if not self.sentences and value != type(self).model_fields[name].default:
                key = "probes.translation"
                raise unused(f"{key}.{name}", value, f"{key}.sentences=0", f"{key}.sentences")
        return self


class ProbesConfig(Section):
    """What is measured, and how often. `every` is in steps; `profiles` adds the rows over depth."""

    every: Annotated[Count, says("steps between records")] = 10
    profiles: Annotated[Flag, says("record arrays over depth too")] = True
    attention: Annotated[Flag, says("with profiles: largest logit and entropy of attention, on 16 queries")] = True
    update: UpdateProbeConfig = UpdateProbeConfig()
    epsilon: EpsilonProbeConfig = EpsilonProbeConfig()
    spikes: SpikesConfig = SpikesConfig()
    stalled: Annotated[Count, says("steps in a row that are not applied before an alarm is raised")] = 5
    translation: TranslationConfig = TranslationConfig()
    layers: Annotated[
        Flag, says("at the end: how far each block turns the stream, and the held-out loss without it")
    ] = False

    @model_validator(mode="after")
    def _combinations(self) -> "ProbesConfig":
        if not self.profiles and not self.attention:
            raise unused("probes.attention", False, "probes.profiles=false", "probes.profiles=true")
        return self
