"""One rank of DeepSpeed on the CPU: ZeRO as STAGE says, in PRECISION, driven by itself or through Accelerate.

It is started as `python -m tests.monitor.deepspeed_worker STAGE PRECISION DRIVER OUT`.
"""

import os
import sys
from pathlib import Path
from typing import Any

os.environ["DS_ACCELERATOR"] = "cpu"
os.environ.setdefault("DEEPSPEED_LOG_LEVEL", "error")

import deepspeed
import torch
import torch.distributed as dist

import normscale
from normscale.errors import BadInput, NonFiniteStop
from tests.monitor.made import Poison, batches, loss_fn, marked, net

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # it would be compiled, for minutes

deepspeed.get_accelerator().is_fp16_supported = lambda: True  # it asks for fast ones; torch has it on any CPU

STAGE, PRECISION, DRIVER, OUT = int(sys.argv[1]), sys.argv[2], sys.argv[3], Path(sys.argv[4])
RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 5,
    "gradient_accumulation_steps": 2,
    "train_batch_size": 10 * WORLD,
    "zero_optimization": {"stage": STAGE},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
    "gradient_clipping": 0.5,
    "zero_allow_untested_optimizer": True,
}
if PRECISION == "bf16":
    CONFIG["bf16"] = {"enabled": True}
if PRECISION == "fp16":
    CONFIG["fp16"] = {"enabled": True, "initial_scale_power": 5, "min_loss_scale": 8, "hysteresis": 1}


def state_of(engine: Any) -> list[torch.Tensor]:
    from deepspeed.utils import safe_get_full_fp32_param

    if STAGE == 0:
        return [p.detach().clone() for p in engine.module.parameters()]
    return [safe_get_full_fp32_param(p).clone() for p in engine.module.parameters()]


def norms_of(engine: Any) -> list[float]:
    """The norm of each block's averaged gradient, as DeepSpeed itself puts it together."""
    from deepspeed.utils import safe_get_full_grad

    blocks = [[safe_get_full_grad(p) for p in block.parameters()] for block in engine.module.blocks]
    scale = float(engine.optimizer.cur_scale) if PRECISION == "fp16" else 1.0
    return [float(torch.cat([grad.flatten().double() for grad in grads]).norm()) / scale for grads in blocks]


def main() -> None:
    model = net(3)
    said: dict[str, Any] = {"reports": [], "weights": [], "norms": [], "refused": "", "stopped": "", "reasons": []}
    accelerator = optimizer = None
    if DRIVER == "accelerate":
        from accelerate import Accelerator, DeepSpeedPlugin
        from accelerate.utils import DummyOptim

        plugin = DeepSpeedPlugin(hf_ds_config=CONFIG)
        os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
        os.environ.pop("ACCELERATE_USE_CPU", None)  # it would leave DeepSpeed out
        deepspeed.init_distributed(dist_backend="gloo")
        accelerator = Accelerator(deepspeed_plugin=plugin, gradient_accumulation_steps=2)
        engine, optimizer = accelerator.prepare(model, DummyOptim(model.parameters(), lr=1e-2))
    else:
        deepspeed.init_distributed(dist_backend="gloo")
        engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=CONFIG)
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[PRECISION]
    Poison(engine.module, "blocks.1.proj")
    monitor = normscale.Monitor(engine, loss_fn, runs=OUT / "runs", every=2)
    data = [batch.to(dtype) for batch in batches(12, seed=10 + RANK)]
    try:
        for index, batch in enumerate(data):
            if RANK == WORLD - 1 and index == 5:  # the second micro-batch of step 3
                batch = marked(batch)
            if accelerator is not None:
                with accelerator.accumulate(engine), monitor.micro_batch(batch):
                    loss = loss_fn(engine, batch)
                    accelerator.backward(loss)
                    report = monitor.step(optimizer, loss)
            else:
                with monitor.micro_batch(batch):
                    loss = loss_fn(engine, batch)
                    engine.backward(loss)
                if STAGE and index % 2:
                    said["norms"].append(norms_of(engine))
                report = monitor.step(engine, loss)
            culprit = report.culprit.fields() if report.culprit is not None else None
            said["reports"].append((report.step, report.applied, report.reason, report.grad_norm, culprit))
            if report.reason != "accumulating":
                said["weights"].append(state_of(engine))
        if PRECISION == "fp16":  # its scale is 16 by now; 8 is the floor
            Poison(engine.module, "blocks.2.proj", float("inf"), backward=True, always=True)
            for batch in 4 * data[:2]:
                with monitor.micro_batch(batch):
                    loss = loss_fn(engine, batch)
                    engine.backward(loss)
                said["reasons"].append(monitor.step(engine, loss).reason)
    except BadInput as error:
        said["refused"] = str(error)
    except NonFiniteStop as error:
        said["stopped"] = str(error)
    said["run_id"] = monitor.run_id
    monitor.close()
    torch.save(said, OUT / f"rank{RANK}.pt")
    dist.destroy_process_group()


main()
