# pyright: reportMissingImports=false, reportUntypedBaseClass=false
"""torchtitan's ``Trainer`` on the CPU, with a small Llama, and the parts that a checkpoint manager
is built of.
"""

import json
import os
import signal
import sys
import tempfile
import traceback
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import titan_on_cpu  # noqa: F401 - before all of torchtitan
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.utils.data import IterableDataset
from torchtitan.components.checkpointer import CheckpointManager
from torchtitan.components.dataloader import ParallelAwareDataloader
from torchtitan.components.loss import CrossEntropyLoss
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.config import DebugConfig, ParallelismConfig, TrainingConfig
from torchtitan.distributed import utils as dist_utils
from torchtitan.models.common import ComplexRoPE, Embedding, Linear, RMSNorm
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.models.llama3 import _build_llama3_layers, parallelize_llama
from torchtitan.models.llama3.model import Llama3Model
from torchtitan.models.llama3.state_dict_adapter import Llama3StateDictAdapter
from torchtitan.protocols.model_spec import ModelSpec
from torchtitan.trainer import Trainer

from sidesave.errors import StateMismatchError
from sidesave.integrations.torchtitan import SidesaveCheckpointManager

VOCABULARY, WIDTH, LENGTH = 64, 32, 16
MANAGERS = {"ours": SidesaveCheckpointManager, "stock": CheckpointManager}


class Numbers(IterableDataset):  # pyright: ignore[reportMissingTypeArgument]
    """Random sequences without an end, which go on where they were."""

    def __init__(self, rank: int) -> None:
        self.rank, self.at = rank, 0

    def __iter__(self) -> Iterator[Any]:
        while True:
            generator = torch.Generator().manual_seed(1000 * self.at + self.rank)
            self.at += 1
            tokens = torch.randint(0, VOCABULARY, (LENGTH + 1,), generator=generator)
            yield {"input": tokens[:-1], "positions": torch.arange(LENGTH)}, tokens[1:]

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


class Loader(ParallelAwareDataloader):
    @dataclass(kw_only=True, slots=True)
    class Config(ParallelAwareDataloader.Config):
        pass

    def __init__(
        self,
        config: Any,
        *,
        dp_world_size: int,
        dp_rank: int,
        local_batch_size: int,
        snapshot_every_n_steps: Any,
        **_: Any,
    ) -> None:
        super().__init__(
            Numbers(dp_rank),
            dp_rank,
            dp_world_size,
            batch_size=local_batch_size,
            snapshot_every_n_steps=snapshot_every_n_steps,
        )


class Tokenizer(BaseTokenizer):
    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        pass

    def __init__(self, config: Any, *, tokenizer_path: str) -> None:
        super().__init__()

    def encode(self, *args: Any, **kwargs: Any) -> list[int]:
        return []

    def decode(self, *args: Any, **kwargs: Any) -> str:
        return ""

    def get_vocab_size(self) -> int:
        return VOCABULARY


def a_model() -> Any:
    """The configuration of a small Llama."""

    def init() -> dict[str, Callable[..., Any]]:
        return {"weight": lambda weight: nn.init.normal_(weight, std=0.05)}

    layers: Any = _build_llama3_layers(
        n_layers=2,
        dim=WIDTH,
        n_heads=4,
        hidden_dim=64,
        fuse_qkv=True,
        attn_backend="flex",
        rope=ComplexRoPE.Config(dim=WIDTH // 4, max_seq_len=LENGTH, theta=10000, scaling="llama"),
    )
    for layer in layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    return Llama3Model.Config(
        dim=WIDTH,
        vocab_size=VOCABULARY,
        tok_embeddings=Embedding.Config(
            num_embeddings=VOCABULARY, embedding_dim=WIDTH, param_init=init()
        ),
        norm=RMSNorm.Config(normalized_shape=WIDTH, param_init={"weight": nn.init.ones_}),
        lm_head=Linear.Config(in_features=WIDTH, out_features=VOCABULARY, param_init=init()),
        layers=layers,
    )


def parallelize(model: Any, **options: Any) -> Any:
    model = parallelize_llama(model, **options)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)  # gloo has no other one
    return model


def a_trainer(folder: str, checkpoint: Any, steps: int, **parallelism: Any) -> Any:
    spec = ModelSpec(
        name="llama3",
        flavor="small",
        model=a_model(),
        parallelize_fn=parallelize,
        pipelining_fn=None,
        post_optimizer_build_fn=None,
        state_dict_adapter=Llama3StateDictAdapter,
    )
    optimizer: Any = default_adamw(lr=0.01)
    optimizer.implementation = "for-loop"
    # its barrier has devices, which gloo does not know
    dist_utils.set_pg_timeouts = lambda **_: None
    return Trainer.Config(
        loss=CrossEntropyLoss.Config(global_vocab_size=VOCABULARY),
        hf_assets_path=folder,
        dump_folder=folder,
        model_spec=spec,
        tokenizer=Tokenizer.Config(),
        optimizer=optimizer,
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=2, total_steps=20),
        training=TrainingConfig(
            local_batch_size=2,
            seq_len=LENGTH,
            steps=steps,
            mixed_precision_param="float32",
            disable_cuda_graphs=True,
        ),
        dataloader=Loader.Config(),
        metrics=MetricsProcessor.Config(log_freq=1),
        parallelism=ParallelismConfig(spmd_backend="partial_dtensor", **parallelism),
        checkpoint=checkpoint,
        activation_checkpoint=None,  # pyright: ignore[reportArgumentType]
        debug=DebugConfig(seed=1, enable_structured_logging=False),
    ).build()


def run_job(
    rank: int,
    size: int,
    meeting: str,
    folder: str,
    kind: str,
    options: dict[str, Any],
    steps: int,
    kill_at: int = -1,
) -> None:
    """Train to ``steps`` in ``folder``, and die in the save of step ``kill_at``.

    The losses of each step are in ``FOLDER/losses-RANK``, and the sum of all parameters and moments
    at the end.
    """
    os.environ.update(LOCAL_RANK=str(rank), RANK=str(rank), WORLD_SIZE=str(size))
    torch.set_num_threads(1)
    join(rank, size, meeting)
    torch.autograd.set_multithreading_enabled(False)  # as torchtitan does where it makes the group
    parallelism = options.pop("parallelism", {})
    config = MANAGERS[kind].Config(enable=True, last_save_model_only=False, **options)
    trainer = a_trainer(folder, config, steps, **parallelism)

    def log(step: int | str, loss: float, *_: Any, **__: Any) -> None:
        with Path(folder, f"losses-{rank}").open("a") as losses:
            losses.write(f"{step} {loss!r}\n")

    trainer.metrics_processor.log = log
    save = trainer.checkpointer.save

    def save_and_die(step: int, last_step: bool = False) -> bool:
        saved = save(step, last_step)
        if step == kill_at:
            try:
                torch.distributed.barrier()
            finally:  # also where another rank is dead already
                os.kill(os.getpid(), signal.SIGKILL)
        return saved

    trainer.checkpointer.save = save_and_die
    trainer.train()
    log("end", fingerprint(trainer))
    trainer.close()
    torch.distributed.destroy_process_group()


class Progress:
    """As the trainer's own state."""

    def __init__(self) -> None:
        self.step = 0

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step, "ntokens_seen": 8 * self.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step = state["step"]


class Parts:
    """What a checkpoint manager is built of, for a small model; ``names`` are those of its layers,
    as on a stage.
    """

    def __init__(
        self,
        seed: int,
        names: tuple[str, ...] = ("first", "last"),
        ranks: tuple[int, int] = (0, 1),
        frozen: str = "",
        width: int = 5,
    ) -> None:
        torch.manual_seed(seed)
        self.model: Any = nn.Sequential(
            OrderedDict([(name, nn.Linear(width, width)) for name in names])
        )
        if frozen:
            self.model.get_submodule(frozen).requires_grad_(requires_grad=False)
        optimizer: Any = default_adamw(lr=0.01)
        optimizer.implementation = "for-loop"
        self.optimizers = optimizer.build(model_parts=[self.model])
        schedule = LRSchedulersContainer.Config(warmup_steps=2)
        self.schedule = schedule.build(optimizers=self.optimizers, training_steps=20)
        rank, size = ranks
        self.loader = Loader(
            None, dp_world_size=size, dp_rank=rank, local_batch_size=2, snapshot_every_n_steps=1
        )
        self.batches: Any = None
        self.progress = Progress()

    def build(self, config: Any, folder: Path | str = "", adapter: Any = None) -> Any:
        return config.build(
            dataloader=self.loader,
            model_parts=[self.model],
            optimizers=self.optimizers,
            lr_schedulers=self.schedule,
            states={"train_state": self.progress},
            sd_adapter=adapter,
            base_folder=str(folder),
        )

    def train(self, steps: int = 1) -> None:
        if self.batches is None:  # after a load, as the trainer makes it
            self.batches = iter(self.loader)
        for _ in range(steps):
            self.progress.step += 1
            tokens, _ = next(self.batches)
            self.model(tokens["input"][:, :5].float()).square().mean().backward()
            self.optimizers.step()
            self.optimizers.zero_grad()
            self.schedule.step()

    def state(self) -> dict[str, Any]:
        """All of it, as plain data."""
        objects = (self.model, self.optimizers, self.schedule, self.loader, self.progress)
        return {
            name: value.tolist() if isinstance(value, torch.Tensor) else value
            for each in objects
            for name, value in each.state_dict().items()
        }


def fingerprint(trainer: Any) -> float:
    """A sum over all parameters and moments of this rank."""
    states = {**trainer.model_parts[0].state_dict(), **trainer.optimizers.state_dict()}
    local = [
        getattr(each, "_local_tensor", each)
        for each in states.values()
        if isinstance(each, torch.Tensor)
    ]
    return sum(each.double().abs().sum().item() for each in local)


def join(rank: int, size: int, meeting: str) -> None:
    store = torch.distributed.FileStore(meeting, size)
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=size)


def save_on_stages(rank: int, size: int, meeting: str, folder: str) -> None:
    """Two ranks save a stage of a pipeline each."""
    join(rank, size, meeting)
    parts = Parts(1 + rank, names=("first", "last")[rank : rank + 1], ranks=(rank, 2))
    manager = parts.build(SidesaveCheckpointManager.Config(enable=True, interval=1), folder)
    parts.train(1 + rank)
    assert manager.save(2)
    manager.close()
    torch.save(parts.state(), f"{folder}/expected-{rank}")
    torch.distributed.destroy_process_group()


def train_parts(rank: int, size: int, meeting: str, folder: str, until: int) -> None:
    """Go on from what is there to step ``until``, saving each.

    What is saved is in ``FOLDER/saved-STEP`` too, what was loaded in ``loaded-STEP``, and the
    process in ``pid``.
    """
    join(rank, size, meeting)
    Path(folder, "pid").write_text(str(os.getpid()))
    parts = Parts(1)
    manager = parts.build(SidesaveCheckpointManager.Config(enable=True, interval=1), folder)
    if manager.load():
        torch.save(parts.state(), f"{folder}/loaded-{parts.progress.step}")
    while parts.progress.step < until:
        manager.maybe_wait_for_staging()
        parts.train()
        torch.save(parts.state(), f"{folder}/saved-{parts.progress.step}")
        manager.save(parts.progress.step)
    manager.close()
    torch.distributed.destroy_process_group()


def load_on_another_mesh(rank: int, size: int, meeting: str, folder: str) -> None:
    """Both ranks load both stages, and take the data of the other one."""
    join(rank, size, meeting)
    expected = [torch.load(f"{folder}/expected-{each}", weights_only=True) for each in range(2)]
    parts = Parts(3, ranks=(1 - rank, 2))
    manager = parts.build(SidesaveCheckpointManager.Config(enable=True, load_only=True), folder)
    assert manager.load()
    state = parts.state()
    for name in state.keys() - {"step", "ntokens_seen", "last_epoch", "world_size"}:
        assert state[name] == {**expected[0], **expected[1]}[name], name
    assert state["step"] == expected[rank]["step"]
    manager = Parts(3, ranks=(2, 3)).build(
        SidesaveCheckpointManager.Config(enable=True, load_only=True), folder
    )
    with pytest.raises(
        StateMismatchError,
        match=r"dataloader.dp_rank_2; add 'dataloader' to .*exclude_from_loading",
    ):
        manager.load()
    torch.distributed.destroy_process_group()


def serve() -> None:
    """For each line of stdin, ``[function, size, arguments]``, fork ranks that call it, and say how
    they have ended.
    """
    for line in sys.stdin:
        function, size, arguments = json.loads(line)
        with tempfile.TemporaryDirectory() as folder:
            ranks = [
                _fork(globals()[function], rank, size, f"{folder}/store", arguments)
                for rank in range(size)
            ]
            print(
                json.dumps([os.waitstatus_to_exitcode(os.waitpid(rank, 0)[1]) for rank in ranks]),
                flush=True,
            )


def _fork(
    function: Callable[..., None], rank: int, size: int, meeting: str, arguments: list[Any]
) -> int:
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        os.dup2(2, 1)  # stdout is for answers
        signal.alarm(280)
        function(rank, size, meeting, *arguments)
        status = 0
    except BaseException:  # noqa: BLE001 - it ends here
        traceback.print_exc()
    finally:
        os._exit(status)
