# pyright: reportMissingImports=false, reportUntypedBaseClass=false
"""Trainers of transformers and accelerate that save by themselves, or with sidesave, and are killed
on the way.
"""

import contextlib
import json
import os
import secrets
import signal
import sys
from pathlib import Path
from typing import Any

import forks
import torch
from torch import nn

WORDS = 32


def quiet() -> None:
    """No network, no progress, as many threads as the machine has to give."""
    os.environ.update(
        HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false", TRANSFORMERS_VERBOSITY="error"
    )
    torch.set_num_threads(1)


def a_model(seed: int = 1, **config: Any) -> Any:
    """A small language model with dropout, so that its losses depend on the random number
    generators.
    """
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(seed)
    sizes = {"n_layer": 1, "n_head": 2, "n_embd": 16, "vocab_size": WORDS, "n_positions": 16}
    return GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0, **config))


def a_tokenizer() -> Any:
    """Of numbers as words."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(
        models.WordLevel({str(word): word for word in range(WORDS)}, unk_token="0")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="0", unk_token="0", eos_token="0"
    )


def a_dataset(count: int = 24) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(7)
    words = torch.randint(0, WORDS, (count, 8), generator=generator)
    return [{"input_ids": each, "labels": each} for each in words]


def trainer_class(api: str, kind: str) -> Any:
    """The trainer's own class, or with sidesave; of ``kind`` ``""`` (also DDP) or ``fsdp``."""
    from transformers import Trainer

    class Stock(Trainer):
        def create_accelerator_and_postprocess(self) -> None:
            super().create_accelerator_and_postprocess()
            if kind == "fsdp":
                _choose_fsdp2(self.accelerator)
                self.is_fsdp_enabled = True

    if api == "stock":
        return Stock
    from sidesave.integrations.transformers import SidesaveTrainerMixin

    return type("MyTrainer", (SidesaveTrainerMixin, Stock), {})


def a_trainer(run: Any, api: str = "ours", model: Any = None, kind: str = "", **given: Any) -> Any:
    """A trainer of a small model; ``given`` are its arguments, those of ``TrainingArguments`` in
    ``args``.
    """
    from transformers import TrainerCallback, TrainingArguments

    quiet()
    args = {
        "output_dir": str(run),
        "use_cpu": True,
        "per_device_train_batch_size": 2,
        "max_steps": 8,
        "lr_scheduler_type": "constant",
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "save_steps": 2,
        "report_to": "none",
        "disable_tqdm": True,
    }
    if torch.distributed.is_initialized():
        args["ddp_backend"] = "gloo"
    args |= given.pop("args", {})

    class Recorder(TrainerCallback):
        """Writes each loss to a file, the last of a step being the one that counts."""

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
            if "loss" in logs and args.process_index == 0:
                with Path(f"{run}.losses").open("a") as file:
                    file.write(f"{state.global_step} {logs['loss']!r}\n")

    given.setdefault("train_dataset", a_dataset())
    model = a_model(tie_word_embeddings=kind != "fsdp") if model is None else model
    made = trainer_class(api, kind)(model=model, args=TrainingArguments(**args), **given)
    made.add_callback(Recorder())
    return made


def losses(run: Any) -> dict[int, str]:
    """The loss of each step, the last time that it was taken."""
    lines = Path(f"{run}.losses").read_text().splitlines()
    return {int(step): loss for step, loss in map(str.split, lines)}


def join(rank: int, size: int, meeting: str) -> None:
    """Make the process group as a launcher would have it, but for the port that somebody else could
    take.
    """
    if size > 1:
        facts = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
        os.environ.update(
            {name: str(value) for name, value in facts.items()},
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT="1",
        )
        store = torch.distributed.FileStore(meeting, size)
        torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=size)


def leave() -> None:
    """End a rank with the others; not by destroying the group, in which gloo has been seen to wait
    without an end.
    """
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
        os._exit(0)


def start(
    call: str, run: Path, api: str, *, size: int = 1, died: bool = False, **orders: Any
) -> None:
    """Call ``run_trainer`` or ``run_job`` in processes; ``died`` if they have to be killed on the
    way.
    """
    orders = {"size": size, "meeting": f"{run}.{secrets.token_hex(4)}", **orders}
    text = "import hf_trainers; hf_trainers.{}({}, {!r}, {!r}, {!r})"
    commands = [text.format(call, rank, str(run), api, json.dumps(orders)) for rank in range(size)]
    processes = [forks.popen([sys.executable, "-c", command]) for command in commands]
    try:
        assert [each.wait(280) for each in processes] == [-signal.SIGKILL if died else 0] * size
    finally:
        for each in processes:
            each.kill()


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def killer(trainer: Any, at: int, how: str) -> Any:
    """A callback that kills this process at the save of step ``at``; ``how`` tells when, and who
    else.
    """
    from transformers import TrainerCallback

    class Killer(TrainerCallback):
        def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step != at:
                return
            if torch.distributed.is_initialized():
                with contextlib.suppress(RuntimeError):  # the other one is dead already
                    torch.distributed.barrier()
            if how == "all":
                os.kill(trainer._sidesave._checkpointer.daemon_pid, signal.SIGKILL)
            die()

    if how == "within":
        _die_in_save(trainer, at)
    return Killer()


def _die_in_save(trainer: Any, at: int) -> None:
    """Die within the save of ``at``, when the model is written or the state is flattened, and no
    more is there.
    """
    from sidesave.client.saving.saver import Saver

    whole = Saver._stage

    def stage(self: Any, *arguments: Any, **options: Any) -> None:
        if trainer.state.global_step == at:
            die()
        whole(self, *arguments, **options)

    Saver._stage = stage
    save_optimizer = trainer._save_optimizer_and_scheduler

    def in_the_middle(output_dir: str) -> None:
        if trainer.state.global_step == at:
            die()
        save_optimizer(output_dir)

    trainer._save_optimizer_and_scheduler = in_the_middle


def run_trainer(rank: int, run: str, api: str, orders: str) -> None:
    """Train in a process of its own. ``orders``, JSON: ``args``, ``kind``, ``resume``, ``kill_at``,
    ``how``.
    """
    told: dict[str, Any] = json.loads(orders)
    join(rank, told["size"], told["meeting"])
    trainer = a_trainer(run, api, kind=told.get("kind", ""), args=told.get("args", {}))
    if told.get("kill_at"):
        trainer.add_callback(killer(trainer, told["kill_at"], told.get("how", "")))
    trainer.train(resume_from_checkpoint=told.get("resume"))
    leave()


# Accelerate ---------------------------------------------------------------------------------------


class Net(nn.Module):
    """A small model with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 9), nn.Tanh(), nn.Dropout(0.2), nn.Linear(9, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


class Mean:
    """An object to register: a running mean of what it is given."""

    def __init__(self) -> None:
        self.value, self.extra = torch.zeros(()), None

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value, "extra": self.extra}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.value, self.extra = state_dict["value"].clone(), state_dict["extra"]


class Job:
    """All that a script has that trains with accelerate; of ``kind`` ``""`` (also DDP) or
    ``fsdp``.
    """

    def __init__(self, kind: str = "", **options: Any) -> None:
        from accelerate import Accelerator
        from accelerate.utils import DataLoaderConfiguration, set_seed

        quiet()
        self.accelerator = accelerator = Accelerator(
            cpu=True,
            dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True, data_seed=5),
            **options,
        )
        if kind == "fsdp":
            _choose_fsdp2(accelerator)
        set_seed(3)
        model: Any = Net()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.9)
        generator = torch.Generator().manual_seed(9)
        data = torch.utils.data.TensorDataset(torch.randn(24, 4, generator=generator))
        # Without a generator of its own a loader draws a seed from the global one at each pass.
        loader = torch.utils.data.DataLoader(
            data, batch_size=2, shuffle=True, generator=torch.Generator()
        )
        self.mean = Mean()
        accelerator.register_for_checkpointing(self.mean)
        self.model, self.optimizer, self.loader, self.scheduler = accelerator.prepare(
            model, optimizer, loader, scheduler
        )

    def train(self, begin: int, until: int, note: Any = None, save: Any = None) -> None:
        """Train steps ``begin`` to ``until``, wherever in an epoch the first one is."""
        per_epoch = len(self.loader)
        step = begin
        while step < until:
            epoch, skipped = divmod(step, per_epoch)
            loader = self.loader
            if skipped:
                loader = self.accelerator.skip_first_batches(loader, skipped)
            loader.set_epoch(epoch)
            for (x,) in loader:
                loss = self.model(x).square().mean()
                self.accelerator.backward(loss)
                self.optimizer.step()
                self.scheduler.step()
                self.optimizer.zero_grad()
                self.mean.value = 0.9 * self.mean.value + 0.1 * loss.detach().cpu()
                if note is not None:
                    note(step, loss.item())
                if save is not None:
                    save(step)
                step += 1
                if step == until:
                    return


def _choose_fsdp2(accelerator: Any) -> None:
    """Accelerate chooses FSDP on devices only; its plugin works on the CPU as well."""
    from accelerate.state import AcceleratorState, PartialState
    from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin

    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="no_wrap", reshard_after_forward=True
    )
    for kind in (AcceleratorState, PartialState):
        kind._shared_state["distributed_type"] = DistributedType.FSDP
    AcceleratorState._shared_state["fsdp_plugin"] = plugin
    assert accelerator.is_fsdp2


def run_job(rank: int, run: str, api: str, orders: str) -> None:
    """Train in a process of its own. ``orders``: JSON of ``until``, ``kill_at``, ``kind``, ``size``
    and ``meeting``.
    """
    told: dict[str, Any] = json.loads(orders)
    join(rank, told["size"], told["meeting"])
    job = Job(told.get("kind", ""))

    def note(step: int, loss: float) -> None:
        with Path(f"{run}.losses-{rank}").open("a") as file:
            file.write(f"{step} {loss!r}\n")

    def kill(step: int) -> None:
        if step == told.get("kill_at"):
            with contextlib.suppress(RuntimeError):
                job.accelerator.wait_for_everyone()
            die()

    if api == "ours":
        from sidesave.integrations.accelerate import SidesaveState

        with SidesaveState(job.accelerator, run) as state:
            begin = state.restore()

            def save(step: int) -> None:
                state.save(step)
                kill(step)

            job.train(begin, told["until"], note, save)
    else:
        done = [int(each.name.removeprefix("at-")) for each in Path(run).glob("at-*")]
        if done:
            job.accelerator.load_state(f"{run}/at-{max(done)}")

        def save(step: int) -> None:
            job.accelerator.save_state(f"{run}/at-{step}")
            kill(step)

        job.train(max(done, default=-1) + 1, told["until"], note, save)
    leave()
