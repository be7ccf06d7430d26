"""The typed configuration of a run: frozen, unknown keys refused, every default in sight.

This is the first of two stages and imports no torch: it checks names, types, ranges and combinations. The second
stage, in `models`, resolves the scheme's and the norm's own options against the schemes themselves.

A value that would silently do nothing (a momentum for AdamW, a floor for a constant schedule) is refused, unless it
is the default.
"""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from normscale.config import deepspeed_file
from normscale.config.engine import EngineConfig
from normscale.config.precision import SCALED, PrecisionConfig
from normscale.config.probes import ProbesConfig
from normscale.config.values import (
    Blocks,
    Count,
    CountOrZero,
    Flag,
    NonNegative,
    Number,
    Options,
    Positive,
    Section,
    Share,
    Text,
    Whole,
    conflict,
    says,
    unused,
)

LEAST_NORMAL = 2.0**-126  # of fp32: below it kernels may flush to 0


def _two_endings(value: Any) -> Any:
    """Returns `value` unless it is a list that holds something other than two texts, which gets one line for all."""
    if not isinstance(value, list | tuple):
        return value
    if len(value) != 2:
        raise conflict(
            f"two endings are wanted, of the source and of the target files, as in [en,de]; not {len(value)}"
        )
    if not all(isinstance(ending, str) for ending in value):
        words = {None: "null", True: "true", False: "false"}
        shown = ", ".join(words[x] if x is None or isinstance(x, bool) else str(x) for x in value)
        raise conflict(f"[{shown}], as YAML reads it, is not two endings; put both in quotes, as in ['no','de']")
    return value


def _scaled_by(value: Any) -> Any:
    """Returns `value`, where true means what it did when there was one way to scale."""
    return {True: "all", False: "none"}[value] if isinstance(value, bool) else value


class ModelConfig(Section):
    """The Transformer. N and M count blocks, not sublayers; M=0 is encoder-only, N=0 decoder-only."""

    N: Annotated[Blocks, says("encoder blocks, each with two sublayers")] = 0
    M: Annotated[Blocks, says("decoder blocks; two sublayers each, three (cross-attention) where N > 0")] = 12
    d: Annotated[Count, says("width of the residual stream")] = 64
    heads: Annotated[Count, says("attention heads; divides d")] = 4
    ffn: Annotated[Count | None, says("null: 4 d, or 8 d / 3 up to a multiple of 8 where gated")] = None
    context: Annotated[Count, says("tokens of one sequence, of each side where there are two")] = 64
    scheme: Annotated[Text, says("where norms stand and how branches join the stream")] = "deepnorm"
    scheme_options: Annotated[Options, says("the scheme's own options")] = {}
    norm: Annotated[Text, says("the norm function")] = "layernorm"
    norm_options: Annotated[Options, says("the norm's own options")] = {}
    norms: Annotated[
        Options,
        says("another norm at encoder or decoder, at attention or ffn, on q and k (qk): a name, or norm and options"),
    ] = {}
    eps: Annotated[
        NonNegative,
        says(
            "epsilon of every norm, inside the root unless norm_options say otherwise",
            "inside: arXiv:1607.06450; outside: the code of arXiv:1910.07467",
        ),
    ] = 1e-5
    positions: Annotated[Literal["rope", "learned", "sinusoidal"], says("how positions enter")] = "rope"
    segments: Annotated[CountOrZero, says("segment (token type) vectors, as in BERT; 0: none")] = 0
    embedding_norm: Annotated[
        Flag, says("a norm after the embedding", "BERT, arXiv:1810.04805; optional in Peri-LN, arXiv:2502.02732")
    ] = False
    qk_norm: Annotated[
        Literal["none", "head", "full", "l2"],
        says(
            "a norm on q and k: per head, full width, or to unit length",
            "arXiv:2309.14322 (head); OLMo 2, arXiv:2501.00656, section 2.1 (full); arXiv:2010.04245, section 3 (l2)",
        ),
    ] = "none"
    qk_scale: Annotated[
        Positive,
        says(
            "qk_norm=l2 only: what the cosine of q and k is multiplied by",
            "arXiv:2010.04245, section 3; 10 in x-transformers",
        ),
    ] = 10.0
    qk_scale_trained: Annotated[
        Flag, says("qk_norm=l2 only: train that number, one an attention", "arXiv:2010.04245, section 3 (true)")
    ] = False
    attention_scale: Annotated[
        Flag,
        says(
            "divide scores by the root of the head width",
            "arXiv:1706.03762, Eq. 1; left out in T5, arXiv:1910.10683",
        ),
    ] = True
    kv_latent: Annotated[
        Count | None,
        says(
            "width of a normed latent that k and v are made from; null: none",
            "DeepSeek-V2, arXiv:2405.04434, Eq. 9 and section 3.1.2",
        ),
    ] = None
    activation: Annotated[
        Literal["gelu", "relu", "swiglu", "geglu"], says("the feed-forward activation; the last two are gated")
    ] = "gelu"
    tied: Annotated[Flag, says("the head is the embedding, transposed")] = True
    bias: Annotated[Flag, says("linear layers have a bias")] = True
    dropout: Annotated[Share, says("share of each branch's output dropped in training")] = 0.0
    init: Annotated[
        Literal["xavier_normal", "xavier_uniform", "normal", "fan_in"],
        says(
            "weight init; fan_in: normal with deviation 1/sqrt(fan-in)",
            "Glorot and Bengio 2010, Eq. 16 (xavier_uniform); arXiv:2203.00555, Figure 2 (xavier_normal);"
            " arXiv:2309.14322 (fan_in)",
        ),
    ] = "xavier_normal"
    init_std: Annotated[
        Positive,
        says(
            "deviation of matrices inside blocks, with init=normal only",
            "0.02 in GPT-2, Megatron-LM and OLMo 2, arXiv:2501.00656",
        ),
    ] = 0.02
    init_truncated: Annotated[
        Flag,
        says("init=normal or fan_in only: nothing beyond three deviations", "arXiv:2309.14322; three in OLMo-core"),
    ] = False
    init_scaled: Annotated[
        Literal["none", "all", "depth"],
        BeforeValidator(_scaled_by),
        says(
            "output projections drawn smaller: all by sqrt(sublayers), depth by sqrt(2 (block + 1))",
            "GPT-2, Radford et al. 2019, section 2.3 (all); llama_depth of OLMo-core, torchtitan (depth)",
        ),
    ] = "none"
    checkpointing: Annotated[Flag, says("recompute blocks in the backward pass")] = False
    compile: Annotated[Flag, says("compile blocks, one graph per block structure")] = False
    backend: Annotated[
        Literal["auto", "eager", "triton", "apex", "liger"],
        says("what norms run on; auto: Triton kernels on a GPU, else eager"),
    ] = "auto"

    @model_validator(mode="after")
    def _combinations(self) -> "ModelConfig":
        if not self.N + self.M:
            raise conflict("0 blocks leave nothing to train; set model.N or model.M to 1 or more", "model.M", "model.N")
        if self.d % self.heads:
            fits = max(h for h in range(1, min(self.heads, 4096) + 1) if self.d % h == 0)
            raise conflict(f"{self.heads} does not divide model.d={self.d}; {fits} does", "model.heads", "model.d")
        if self.positions == "rope" and (self.d // self.heads) % 2:
            raise conflict(
                f"rope turns pairs and needs an even head width, but model.d={self.d} / model.heads={self.heads}"
                f" is {self.d // self.heads}; change one of them or set model.positions=learned",
                "model.positions",
                "model.d",
                "model.heads",
            )
        if 0 < self.eps < LEAST_NORMAL or self.eps > 1 / LEAST_NORMAL:
            raise conflict(
                f"{self.eps:g} is no normal number of fp32, in which norms keep their statistics whatever the"
                f" precision; give 0, or {LEAST_NORMAL:.3g} to {1 / LEAST_NORMAL:.3g}",
                "model.eps",
            )
        if self.backend in ("apex", "liger") and self.compile:
            raise conflict(
                f"{self.backend} runs in eager mode only; set model.compile=false, or model.backend=auto",
                "model.backend",
                "model.compile",
            )
        if self.init != "normal" and self.init_std != 0.02:
            raise unused("model.init_std", self.init_std, f"model.init={self.init}", "model.init=normal")
        if self.init.startswith("xavier") and self.init_truncated:
            raise unused("model.init_truncated", "true", f"model.init={self.init}", "model.init=normal or fan_in")
        if self.qk_norm != "l2":
            for name in ("qk_scale", "qk_scale_trained"):
                if (value := getattr(self, name)) != type(self).model_fields[name].default:
                    shown = "true" if value is True else value
                    raise unused(f"model.{name}", shown, f"model.qk_norm={self.qk_norm}", "model.qk_norm=l2")
        if self.qk_norm == "l2" and not self.attention_scale:
            raise unused("model.attention_scale", "false", "model.qk_norm=l2", "model.qk_scale")
        return self


TaskName = Literal["lm", "mlm", "span", "translation", "copy", "reverse"]
TASKS_OF: dict[str, tuple[TaskName, ...]] = {
    "decoder": ("lm",),
    "encoder": ("mlm",),
    "encoder-decoder": ("span", "translation", "copy", "reverse"),
}
"""What each topology can be trained on; the first is what `data.task=null` means."""


class DataConfig(Section):
    """The task and the text it is made from, read as bytes or, for translation, in subwords."""

    task: Annotated[
        TaskName | None, says("null: lm for a decoder, mlm for an encoder, span for an encoder and a decoder")
    ] = None
    source: Annotated[
        Text,
        says(
            "embedded, a path to .txt or .jsonl, or hub:owner/name; for translation the path before .en and .de, or"
            " hub:iwslt2017, hub:wmt17, hub:opus100"
        ),
    ] = "embedded"
    field: Annotated[Text, says("key of the text in JSONL lines and hub data sets")] = "text"
    languages: Annotated[
        tuple[Text, Text] | None,
        BeforeValidator(_two_endings),
        says("translation only: endings of the source and target files, [en, de]"),
    ] = None
    held_out_source: Annotated[
        Text | None,
        says("translation only: path of held-out files, or a split of the hub's set; null: a share of the lines"),
    ] = None
    subwords: Annotated[
        Annotated[Whole, Field(gt=256, le=2**20)] | None,
        says("translation only: size of a byte-pair vocabulary made of the training lines; null: bytes"),
    ] = None
    held_out: Annotated[Number, Field(gt=0, lt=1), says("share of the text never trained on")] = 0.1
    max_bytes: Annotated[
        Count | None,
        says("most bytes of training text; held out: that share more, of held_out_source as many; null: all"),
    ] = 4_000_000
    noise: Annotated[Share, says("mlm and span only: share of the tokens that are hidden")] = 0.15
    span: Annotated[Annotated[Number, Field(ge=1)], says("span only: mean length of a hidden span, in tokens")] = 3.0
    symbols: Annotated[Annotated[Whole, Field(ge=2, le=4096)], says("copy and reverse only: size of alphabet")] = 32

    @property
    def expected_vocab(self) -> int:
        """About how many tokens there are, before any text is read: special ones change next to nothing."""
        return self.subwords or 256

    @model_validator(mode="after")
    def _combinations(self) -> "DataConfig":
        if self.field != "text" and (self.source == "embedded" or self.source.endswith(".txt")):
            mend = "data.source to a .jsonl file or a hub name"
            raise unused("data.field", repr(self.field), f"data.source={self.source}", mend)
        if self.languages is not None and self.languages[0] == self.languages[1]:
            raise conflict(
                f"both endings are {self.languages[0]!r}, so that each line would be its own translation; give two",
                "data.languages",
            )
        if self.held_out_source is not None and self.held_out != type(self).model_fields["held_out"].default:
            has = f"data.held_out_source={self.held_out_source}"
            raise unused("data.held_out", self.held_out, has, "data.held_out_source=null")
        return self

    def check_task(self, task: TaskName) -> None:
        """Raises the error of a value that `task`, which is now known, would not read."""
        only: dict[str, tuple[TaskName, ...]] = {
            "languages": ("translation",),
            "held_out_source": ("translation",),
            "subwords": ("translation",),
            "noise": ("mlm", "span"),
            "span": ("span",),
            "symbols": ("copy", "reverse"),
            "source": ("lm", "mlm", "span", "translation"),
            "field": ("lm", "mlm", "span"),
            "held_out": ("lm", "mlm", "span", "translation"),
            "max_bytes": ("lm", "mlm", "span", "translation"),
        }
        same_topology = next(tasks for tasks in TASKS_OF.values() if task in tasks)
        for name, tasks in only.items():
            value = getattr(self, name)
            if task not in tasks and value != type(self).model_fields[name].default:
                shown = list(value) if isinstance(value, tuple) else value
                mend = next((f"data.task={other}" for other in tasks if other in same_topology), None)
                raise unused(f"data.{name}", shown, f"data.task={task}", mend)
        if self.noise == 0 and task in ("mlm", "span"):
            raise conflict("0 hides nothing, so there would be nothing to predict; give 0.15, say", "data.noise")
        if task == "translation" and (self.languages is None or self.source == "embedded"):
            raise conflict(
                "translation reads parallel files; set data.source to the path before their endings and"
                " data.languages to these, as in data.source=wmt/train data.languages=[en,de]",
                "data.task",
            )


class OptimConfig(Section):
    """The optimizer. `clip` is the largest global gradient norm; null turns clipping off."""

    name: Annotated[Literal["adamw", "sgd"], says("the optimizer")] = "adamw"
    lr: Annotated[Positive, says("peak learning rate")] = 1e-3
    betas: Annotated[tuple[Share, Share], says("decay of AdamW's two averages")] = (0.9, 0.98)
    eps: Annotated[Positive, says("AdamW's epsilon")] = 1e-8
    weight_decay: Annotated[NonNegative, says("weight decay")] = 0.0
    momentum: Annotated[Share, says("SGD's momentum")] = 0.0
    clip: Annotated[Positive | None, says("largest global gradient norm; null: no clipping")] = None

    @model_validator(mode="after")
    def _combinations(self) -> "OptimConfig":
        needs = {"adamw": ("betas", "eps"), "sgd": ("momentum",)}
        for owner, fields in needs.items():
            for field in fields:
                value = getattr(self, field)
                if self.name != owner and value != type(self).model_fields[field].default:
                    shown = list(value) if isinstance(value, tuple) else value
                    name = "train.optim.name"
                    raise unused(f"train.optim.{field}", shown, f"{name}={self.name}", f"{name}={owner}")
        return self


class ScheduleConfig(Section):
    """The learning rate over *applied* steps."""

    kind: Annotated[Literal["constant", "inverse_sqrt", "cosine"], says("shape after the warm-up")] = "constant"
    warmup_steps: Annotated[CountOrZero, says("steps of linear warm-up")] = 0
    floor: Annotated[Share, says("cosine only: last learning rate as a share of the peak")] = 0.0

    @model_validator(mode="after")
    def _combinations(self) -> "ScheduleConfig":
        if self.floor and self.kind != "cosine":
            kind = "train.schedule.kind"
            raise unused("train.schedule.floor", self.floor, f"{kind}={self.kind}", f"{kind}=cosine")
        return self


class TrainConfig(Section):
    """Steps and batches. `batch` is the number of sequences of one optimizer step over all ranks."""

    steps: Annotated[Count, says("optimizer steps to attempt")] = 200
    batch: Annotated[Count, says("sequences of one optimizer step, over all ranks")] = 8
    accumulate: Annotated[Count, says("micro-batches of one step; divides batch")] = 1
    eval_every: Annotated[CountOrZero, says("steps between held-out losses; 0: at the start and the end only")] = 0
    eval_batches: Annotated[Count, says("held-out batches of one evaluation")] = 8
    on_nonfinite: Annotated[Literal["skip", "stop"], says("at a loss or gradient that is not finite")] = "stop"
    stop_after: Annotated[
        Count | None, says("with on_nonfinite=skip: the run ends after so many such steps in a row; null: never")
    ] = None
    label_smoothing: Annotated[
        Share, says("share of each target that is spread over all tokens in what is differentiated")
    ] = 0.0
    z_loss: Annotated[NonNegative, says("weight of log^2 Z of the output softmax in what is differentiated")] = 0.0
    optim: OptimConfig = OptimConfig()
    schedule: ScheduleConfig = ScheduleConfig()

    @model_validator(mode="after")
    def _combinations(self) -> "TrainConfig":
        if self.schedule.warmup_steps > self.steps:
            raise conflict(
                f"{self.schedule.warmup_steps} is more than train.steps={self.steps}, so the peak is never reached;"
                " shorten the warm-up or train longer",
                "train.schedule.warmup_steps",
                "train.steps",
            )
        if self.batch % self.accumulate:
            raise conflict(
                f"{self.accumulate} does not divide train.batch={self.batch}", "train.accumulate", "train.batch"
            )
        if self.stop_after is not None and self.on_nonfinite == "stop":
            raise unused("train.stop_after", self.stop_after, "train.on_nonfinite=stop", "train.on_nonfinite=skip")
        return self


class CheckpointConfig(Section):
    """Complete states to go on from, in the run's folder. A run that was interrupted goes on from the newest."""

    every: Annotated[CountOrZero, says("steps between checkpoints, and one after the last; 0: none are written")] = 0
    keep: Annotated[Count, says("newest checkpoints that are kept")] = 2

    @model_validator(mode="after")
    def _combinations(self) -> "CheckpointConfig":
        if not self.every and self.keep != 2:
            raise unused("checkpoint.keep", self.keep, "checkpoint.every=0", "checkpoint.every")
        return self


class TrackingConfig(Section):
    """Where records go. The spool is always written; `uri` is where the sink replays it to (null: nowhere)."""

    runs: Annotated[Text, says("folder of the runs' own records")] = "runs"
    uri: Annotated[Text | None, says("MLflow store the sink fills; null: none")] = "sqlite:///mlflow.db"


class RunConfig(Section):
    """Everything one run depends on."""

    name: Annotated[Text, says("a label for people; numbers do not depend on it")] = "run"
    seed: Annotated[Whole, Field(ge=0, lt=2**31), says("of init, data order and dropout")] = 0
    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    train: TrainConfig = TrainConfig()
    precision: PrecisionConfig = PrecisionConfig()
    engine: EngineConfig = EngineConfig()
    probes: ProbesConfig = ProbesConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    tracking: TrackingConfig = TrackingConfig()

    @model_validator(mode="after")
    def _combinations(self) -> "RunConfig":
        steps = self.probes.update.steps
        if steps and steps[-1] > self.train.steps:
            raise conflict(
                f"{steps[-1]} is after the last step, train.steps={self.train.steps}",
                "probes.update.steps",
                "train.steps",
            )
        topology, task = self.topology, self.task
        if task not in TASKS_OF[topology]:
            fits = ", ".join(TASKS_OF[topology])
            raise conflict(
                f"{task} is nothing for {_article(topology)} model (model.N={self.model.N} model.M={self.model.M});"
                f" it takes {fits}",
                "data.task",
                "model.N",
                "model.M",
            )
        self.data.check_task(task)
        if self.model.segments and task != "mlm":
            mends = ["model.M=0" if self.model.N else "model.M=0 and model.N to 1 or more"]
            mends += ["data.task=mlm"] if self.data.task else []
            raise unused("model.segments", self.model.segments, f"data.task={task}", " and ".join(mends))
        wanted = self.probes.translation.sentences
        if wanted and task != "translation":
            mend = "data.task=translation" if topology == "encoder-decoder" else None
            raise unused("probes.translation.sentences", wanted, f"data.task={task}", mend)
        if wanted and (self.engine.name == "fsdp2" or self.engine.zero == 3):
            raise conflict(
                f"{wanted} cannot be translated on the way with weights in shards (engine.name={self.engine.name}):"
                " a search makes as many passes as its sentences ask for; set it to 0, write checkpoints"
                " (checkpoint.every), and run normscale translate afterwards",
                "probes.translation.sentences",
                "engine.name",
            )
        if task == "span" and self.model.context < 3:
            raise conflict(
                f"{self.model.context} is too short for data.task=span: the target is a sentinel, the hidden token and"
                " the end; give 3 or more",
                "model.context",
            )
        if self.precision.compute in SCALED and self.model.compile:
            raise conflict(
                f"{self.precision.compute} products are rounded one by one and cannot be compiled;"
                " set model.compile=false or precision.compute=bf16",
                "precision.compute",
                "model.compile",
            )
        return self

    @property
    def topology(self) -> Literal["encoder", "decoder", "encoder-decoder"]:
        """What the model is made of, by which of N and M are not 0."""
        if self.model.N and self.model.M:
            return "encoder-decoder"
        return "encoder" if self.model.N else "decoder"

    @property
    def task(self) -> TaskName:
        """What is trained: `data.task`, or what the topology is trained on where that says nothing."""
        return self.data.task or TASKS_OF[self.topology][0]

    def numerical(self) -> dict[str, Any]:
        """Returns the part of the configuration that numbers depend on (no names, no places).

        Raises:
            ConfigError: the DeepSpeed JSON that it names cannot be read.
        """
        left_out: Any = {"name": True, "tracking": True, "checkpoint": True, "engine": {"timeout_s"}}
        numbers = self.model_dump(mode="json", exclude=left_out)
        numbers["data"]["task"] = self.task
        if self.engine.json is not None:  # what it says, not where it lies
            numbers["engine"]["json"] = deepspeed_file.read(self.engine.json)
        return numbers


def _article(topology: str) -> str:
    return f"an {topology}" if topology.startswith("e") else f"a {topology}"
