"""The schema itself: types, ranges and combinations, without files."""

import pytest
from pydantic import ValidationError

from normscale.config.load import load
from normscale.config.schema import ModelConfig, OptimConfig, RunConfig
from normscale.errors import ConfigError


def test_a_configuration_is_frozen_at_every_depth() -> None:
    config = RunConfig()
    for section, field in ((config, "seed"), (config.model, "d"), (config.train.optim, "lr")):
        with pytest.raises(ValidationError):
            setattr(section, field, 1)


def test_numerical_leaves_out_names_and_places_only() -> None:
    config = RunConfig()
    assert RunConfig.model_fields.keys() - config.numerical().keys() == {"name", "tracking", "checkpoint"}
    assert config.numerical()["train"]["optim"]["betas"] == [0.9, 0.98]
    assert load(None, ["name=other", "tracking.runs=elsewhere"]).numerical() == config.numerical()
    assert load(None, ["checkpoint.every=5"]).numerical() == config.numerical()
    assert load(None, ["engine.timeout_s=5"]).numerical() == config.numerical()
    assert load(None, ["engine.name=fsdp2"]).numerical() != config.numerical()
    assert load(None, ["data.task=lm"]).numerical() == config.numerical()  # which it is, unsaid
    assert load(None, ["seed=1"]).numerical() != config.numerical()
    assert load(None, ["model.eps=0"]).numerical() == load(None, ["model.eps=0.0"]).numerical()


REFUSED = [
    (["model.d=30"], "model.heads: 4 does not divide model.d=30; 3 does"),
    (["model.d=12"], "model.positions: rope turns pairs and needs an even head width"),
    (["model.M=0"], "model.M: 0 blocks leave nothing to train; set model.N or model.M to 1 or more"),
    (["data.task=copy"], "data.task: copy is nothing for a decoder model (model.N=0 model.M=12); it takes lm"),
    (["model.N=3", "model.M=0", "data.task=lm"], "data.task: lm is nothing for an encoder model (model.N=3 model.M=0)"),
    (["model.N=3", "data.task=mlm"], "data.task: mlm is nothing for an encoder-decoder model"),
    (["data.noise=0.3"], "data.noise: 0.3 would do nothing with data.task=lm"),
    (["model.N=3", "data.noise=0"], "data.noise: 0 hides nothing"),
    (["model.N=3", "data.task=translation"], "data.task: translation reads parallel files"),
    (["model.N=3", "data.task=copy", "data.source=a.txt"], "data.source: a.txt would do nothing with data.task=copy"),
    (["model.N=3", "data.task=reverse", "data.max_bytes=9"], "data.max_bytes: 9 would do nothing with data.task=rev"),
    (["model.N=3", "data.task=copy", "data.held_out=0.2"], "data.held_out: 0.2 would do nothing with data.task=copy"),
    (["data.languages=[en, de]"], "data.languages: ['en', 'de'] would do nothing with data.task=lm"),
    (
        ["model.segments=2"],
        "model.segments: 2 would do nothing with data.task=lm; remove it or set model.M=0 and model.N to 1 or more (",
    ),
    (
        ["model.segments=2", "model.N=1", "data.task=copy"],
        "model.segments: 2 would do nothing with data.task=copy; remove it or set model.M=0 and data.task=mlm (",
    ),
    (
        ["model.N=1", "data.task=copy", "data.max_bytes=null"],
        "data.max_bytes: null would do nothing with data.task=copy; remove it or set data.task=span (",
    ),
    (
        ["model.N=1", "data.task=copy", "data.noise=0.3"],
        "data.noise: 0.3 would do nothing with data.task=copy; remove it or set data.task=span (",
    ),
    (["data.span=2"], "data.span: 2.0 would do nothing with data.task=lm; remove it ("),
    (["model.N=1", "model.context=2"], "model.context: 2 is too short for data.task=span"),
    (["data.languages=[en,en]"], "data.languages: both endings are 'en'"),
    (["data.languages=[en]"], "data.languages: two endings are wanted"),
    (["data.languages=[en,de,fr]"], "data.languages: two endings are wanted"),
    (["data.languages=[1,2]"], "data.languages: [1, 2], as YAML reads it, is not two endings; put both in quotes"),
    (["data.languages=[no,de]"], "data.languages: [false, de], as YAML reads it, is not two endings; put both in quot"),
    (
        ["data.held_out_source=a", "data.held_out=0.2"],
        "data.held_out: 0.2 would do nothing with data.held_out_source=a; remove it or",
    ),
    (["precision.loss_scale.initial=8"], "precision.loss_scale.initial: 8.0 would do nothing with precision.compute"),
    (["precision.compute=fp16", "precision.loss_scale.initial=0.5"], "precision.loss_scale.minimum: 1 is more than"),
    (
        ["precision.compute=fp16", "precision.loss_scale.initial=1.27e30"],
        "precision.loss_scale.initial: 1.27e+30 is not between 2**-24 and 2**24; give 16777216",
    ),
    (
        ["precision.compute=fp16", "precision.loss_scale.minimum=1e-9"],
        "precision.loss_scale.minimum: 1e-09 is not between 2**-24 and 2**24; give 5.9604644775390625e-08",
    ),
    (["precision.compute=fp16", "model.compile=true"], "precision.compute: fp16 products are rounded one by one"),
    (["precision.compute=bf16", "precision.tf32=true"], "precision.tf32: True would do nothing"),
    (["precision.softmax=compute"], "precision.softmax: compute would do nothing with precision.compute=fp32"),
    (["checkpoint.keep=3"], "checkpoint.keep: 3 would do nothing with checkpoint.every=0"),
    (["model.M=-1"], "model.M: -1 is not a whole number >= 0"),
    (["model.M=1000000"], "model.M: 1000000 is not a whole number >= 0 and <= 10000"),
    (["model.N=100_000_000"], "model.N: 100000000 is not a whole number >= 0 and <= 10000"),
    (["model.dropout=1"], "model.dropout: 1 is not a number >= 0 and < 1"),
    (
        ["model.init_truncated=true"],
        "model.init_truncated: true would do nothing with model.init=xavier_normal; remove it or set model.init=normal",
    ),
    (["model.init=fan_in", "model.init_std=0.1"], "model.init_std: 0.1 would do nothing with model.init=fan_in"),
    (["model.init_scaled=deep"], "model.init_scaled: 'deep' is not one of none, all, depth; did you mean 'depth'?"),
    (["model.qk_scale=8"], "model.qk_scale: 8.0 would do nothing with model.qk_norm=none; remove it or set model.qk"),
    (["model.qk_scale_trained=true", "model.qk_norm=head"], "model.qk_scale_trained: true would do nothing with"),
    (["model.qk_norm=l2", "model.attention_scale=false"], "model.attention_scale: false would do nothing with"),
    (["model.init_std=0.1"], "model.init_std: 0.1 would do nothing with model.init=xavier_normal"),
    (["data.field=body"], "data.field: 'body' would do nothing with data.source=embedded"),
    (["data.field=body", "data.source=a.txt"], "data.field: 'body' would do nothing with data.source=a.txt"),
    (["data.held_out=0"], "data.held_out: 0 is not a number > 0 and < 1"),
    (["train.batch=8", "train.accumulate=3"], "train.accumulate: 3 does not divide train.batch=8"),
    (
        ["train.steps=10", "train.schedule.warmup_steps=11"],
        "train.schedule.warmup_steps: 11 is more than train.steps=10",
    ),
    (["train.schedule.floor=0.1"], "train.schedule.floor: 0.1 would do nothing with train.schedule.kind=constant"),
    (["train.optim.momentum=0.9"], "train.optim.momentum: 0.9 would do nothing with train.optim.name=adamw"),
    (["train.optim.name=sgd", "train.optim.betas=[0.9,0.9]"], "train.optim.betas: [0.9, 0.9] would do nothing"),
    (["train.optim.name=sgd", "train.optim.eps=1e-6"], "train.optim.eps: 1e-06 would do nothing"),
    (["train.optim.clip=0"], "train.optim.clip: 0 is not a number > 0 or null"),
    (["probes.update.steps=[1,1]"], "probes.update.steps: 1 comes after 1; steps must rise"),
    (["probes.update.steps=[2,1]"], "probes.update.steps: 1 comes after 2; steps must rise"),
    (["probes.update.steps=[1,201]"], "probes.update.steps: 201 is after the last step, train.steps=200"),
    (["probes.update.sequences=8"], "probes.update.sequences: 8 would do nothing with probes.update.steps=[]"),
    (["probes.epsilon.rows=8"], "probes.epsilon.rows: 8 would do nothing with probes.epsilon.every=0; remove it "),
    (["probes.epsilon.every=-1"], "probes.epsilon.every: -1 is not a whole number >= 0"),
    (["probes.spikes.window=1"], "probes.spikes.window: 1 is not a whole number >= 2"),
    (["probes.spikes.sigmas=0"], "probes.spikes.sigmas: 0 is not a number > 0"),
    (
        ["engine.zero=2"],
        "engine.zero: 2 would do nothing with engine.name=auto; remove it or set engine.name=deepspeed",
    ),
    (["engine.zero=4", "engine.name=deepspeed"], "engine.zero: 4 is not a whole number >= 0 and <= 3"),
    (["engine.offload=cpu", "engine.name=fsdp2"], "engine.offload: cpu would do nothing with engine.name=fsdp2"),
    (["engine.json=ds.json", "engine.name=ddp"], "engine.json: ds.json would do nothing with engine.name=ddp"),
    (
        ["engine.offload=cpu", "engine.name=deepspeed", "engine.zero=0"],
        "engine.offload: cpu would do nothing with engine.zero=0; remove it or set engine.zero=1",
    ),
    (["engine.timeout_s=0"], "engine.timeout_s: 0 is not between 1 and 86400 seconds"),
    (
        ["engine.name=fsdp"],
        "engine.name: 'fsdp' is not one of auto, plain, ddp, fsdp2, deepspeed; did you mean 'fsdp2'?",
    ),
    (["probes.stalled=0"], "probes.stalled: 0 is not a whole number >= 1"),
]


@pytest.mark.parametrize(("overrides", "says"), REFUSED, ids=[" ".join(overrides) for overrides, _ in REFUSED])
def test_what_cannot_work_or_would_do_nothing_is_refused(overrides: list[str], says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(None, overrides)
    assert str(caught.value).startswith(says)
    assert str(caught.value).endswith(")")  # the place
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "overrides",
    [
        ["model.eps=0"],
        ["model.heads=1", "model.d=2"],
        ["model.d=12", "model.positions=learned"],
        ["model.init=normal", "model.init_std=0.1"],
        ["model.init_std=0.02"],
        ["model.init=fan_in", "model.init_truncated=true"],
        ["model.init_scaled=true"],
        ["model.qk_norm=l2", "model.qk_scale=8", "model.qk_scale_trained=true"],
        ["model.attention_scale=false", "model.qk_norm=head"],
        ["model.norms.encoder=rmsnorm", "model.norms.ffn.norm=dyt", "model.norms.ffn.norm_options.alpha_tanh=0.8"],
        ["model.ffn=null", "train.optim.clip=null"],
        ["data.field=body", "data.source=a.jsonl"],
        ["data.field=body", "data.source=hub:owner/name"],
        ["train.accumulate=8"],
        ["train.steps=10", "train.schedule.warmup_steps=10"],
        ["train.schedule.floor=0.1", "train.schedule.kind=cosine"],
        ["train.optim.name=sgd", "train.optim.momentum=0.9"],
        ["train.optim.name=sgd", "train.optim.betas=[0.9,0.98]"],
        ["probes.update.steps=[1,5,200]", "probes.update.sequences=8"],
        ["probes.update.every=50", "probes.update.sequences=8"],
        ["probes.epsilon.every=1000", "probes.epsilon.rows=8"],
        ["probes.spikes.sigmas=7", "probes.spikes.window=1000", "probes.stalled=1"],
        ["engine.name=deepspeed", "engine.zero=3", "engine.offload=cpu", "engine.json=ds.json"],
        ["engine.name=fsdp2", "engine.zero=1", "engine.offload=none"],
        ["model.scheme=not-checked-here", "model.norm=nor-this"],
    ],
    ids=" ".join,
)
def test_what_works_is_accepted(overrides: list[str]) -> None:
    assert isinstance(load(None, overrides), RunConfig)


def test_sections_can_be_built_in_code_with_the_same_checks() -> None:
    assert ModelConfig(d=128, heads=8).d == 128
    with pytest.raises(ValidationError, match="4 does not divide"):
        ModelConfig(d=30)
    with pytest.raises(ValidationError, match="would do nothing"):
        OptimConfig(momentum=0.9)
    with pytest.raises(ValidationError):
        ModelConfig(heads=True)
