# pyright: reportMissingImports=false
"""A transformers Trainer that saves with sidesave: its own options and its own resume, with whole
checkpoints only.
"""

import importlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors import safe_open

import sidesave
from sidesave.client.integrations.hf_model import pretrained_files
from sidesave.errors import InvalidArgumentError, UnsupportedValueError

transformers: Any = pytest.importorskip(
    "transformers", reason="needs transformers: scripts/test --integrations transformers"
)

import guides  # noqa: E402 - after the skip
import hf_trainers  # noqa: E402 - after the skip
from hf_trainers import a_dataset, a_model, a_tokenizer, a_trainer, losses, start  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")  # of transformers, accelerate and torch


def links(run: Path) -> dict[str, str]:
    return {
        each.name: str(each.readlink()) for each in run.glob("checkpoint-*") if each.is_symlink()
    }


def equal(one: Any, other: Any) -> bool:
    mine, theirs = one.state_dict(), other.state_dict()
    return mine.keys() == theirs.keys() and all(torch.equal(mine[key], theirs[key]) for key in mine)


def whole(run: Path) -> bool:
    """Whether everything that bears a checkpoint's name is one, to its last byte."""
    return all(sidesave.verify(each).ok for each in run.glob("checkpoint-*"))


# What is written ----------------------------------------------------------------------------------


def test_a_checkpoint_opens_with_from_pretrained(tmp_path: Path):
    run = tmp_path / "run"
    trainer = a_trainer(run, args={"max_steps": 2}, processing_class=a_tokenizer())
    trainer.train()
    assert links(run) == {"checkpoint-2": "step-00000002"}
    found = transformers.trainer_utils.get_last_checkpoint(str(run))
    assert found == str(run / "checkpoint-2")
    model, about = transformers.AutoModelForCausalLM.from_pretrained(
        found, output_loading_info=True
    )
    assert not any(about[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert type(model) is type(trainer.model)
    assert equal(model, trainer.model)
    assert transformers.AutoTokenizer.from_pretrained(found)("3 1 4")["input_ids"] == [3, 1, 4]
    state = json.loads((run / "checkpoint-2" / "trainer_state.json").read_text())
    assert (state["global_step"], len(state["log_history"])) == (2, 2)
    assert sidesave.verify(run / "checkpoint-2").ok


def two_templates() -> Any:
    tokenizer = a_tokenizer()
    tokenizer.chat_template = {"default": "one", "tool_use": "two"}
    return tokenizer


def test_a_tokenizer_comes_back_with_all_its_chat_templates(tmp_path: Path):
    run = tmp_path / "run"
    a_trainer(
        run, args={"max_steps": 2}, processing_class=two_templates(), data_collator=stack
    ).train()
    found = run / "checkpoint-2"
    assert transformers.AutoTokenizer.from_pretrained(found).chat_template == {
        "default": "one",
        "tool_use": "two",
    }
    assert sidesave.verify(found).ok


def stack(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


CUSTOM_CODE = """
from transformers import GPT2LMHeadModel

class CustomModel(GPT2LMHeadModel):
    def save_pretrained(self, folder, **options):
        super().save_pretrained(folder, **options)
        with open(f"{folder}/own.txt", "w") as file:
            file.write("own")
"""


@pytest.mark.parametrize("kind", ["plain", "templates", "custom code", "processor"])
def test_all_files_that_save_pretrained_writes_beside_the_weights_are_written(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    model, processors = a_model(), [a_tokenizer()]
    if kind == "templates":
        processors = [two_templates()]
    elif kind == "processor":
        processors = [transformers.WhisperFeatureExtractor(), a_tokenizer()]
    elif kind == "custom code":
        (tmp_path / "custom_model.py").write_text(CUSTOM_CODE)
        monkeypatch.syspath_prepend(tmp_path)
        custom = importlib.import_module("custom_model").CustomModel
        custom.register_for_auto_class("AutoModelForCausalLM")
        model = custom(model.config)
    for each in (model, *processors):
        each.save_pretrained(tmp_path / "stock")
    stock = {
        file.relative_to(tmp_path / "stock").as_posix(): file
        for file in (tmp_path / "stock").rglob("*.*")
    }
    weights = stock.pop("model.safetensors")
    assert weights.stat().st_size > 0
    ours = pretrained_files(model, processors)
    assert ours == {name: file.read_bytes() for name, file in stock.items()}
    if kind == "custom code":
        assert {"custom_model.py", "own.txt"} <= ours.keys()


@pytest.mark.parametrize("kind", ["own parameters", "tied across", "extra state"])
def test_models_of_other_makes_come_back(kind: str, tmp_path: Path):
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words = torch.nn.Embedding(hf_trainers.WORDS, 4)
            self.head = torch.nn.Linear(4, hf_trainers.WORDS, bias=False)
            self.optimizer = torch.nn.Linear(4, 4)  # a name that says nothing
            if kind == "own parameters":
                self.scale = torch.nn.Parameter(torch.ones(4))
                self.register_buffer("seen", torch.zeros((), dtype=torch.long))
                self.register_buffer("passing", torch.zeros(3), persistent=False)
            elif kind == "tied across":
                self.head.weight = self.words.weight
            else:
                self.note = "none"

        def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> Any:
            hidden = self.optimizer(self.words(input_ids)) * getattr(self, "scale", 1)
            if hasattr(self, "seen"):
                self.seen += 1
            if hasattr(self, "note"):
                self.note = f"{self.note}."
            logits = self.head(hidden)
            return {
                "loss": torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
            }

        if kind == "extra state":

            def get_extra_state(self) -> Any:
                return {"note": self.note}

            def set_extra_state(self, state: Any) -> None:
                self.note = state["note"]

    run = tmp_path / "run"
    torch.manual_seed(1)
    model = Model()
    a_trainer(run, model=model, args={"max_steps": 4}).train()
    torch.manual_seed(2)
    other = Model()
    a_trainer(run, model=other, args={"max_steps": 4}).train(
        resume_from_checkpoint=str(run / "checkpoint-2")
    )
    assert equal(model, other) if kind != "extra state" else other.note == model.note == "none...."
    assert torch.equal(model.head.weight, other.head.weight)
    assert (run / "checkpoint-2" / "model.safetensors.index.json").exists() == (
        kind != "extra state"
    )


@pytest.mark.parametrize(
    ("frozen", "is_tied"),
    [("transformer.wte", True), ("transformer.h.0.attn", True), ("transformer", False)],
)
def test_a_partly_frozen_model_opens_with_from_pretrained_and_is_gone_on_with(
    frozen: str, is_tied: bool, tmp_path: Path
):
    def model(seed: int) -> Any:
        made = a_model(seed, tie_word_embeddings=is_tied)
        for name, parameter in made.named_parameters():
            parameter.requires_grad_(not name.startswith(frozen))
        return made

    run = tmp_path / "run"
    first = model(1)
    a_trainer(run, model=first, args={"max_steps": 4}).train()
    found = str(run / "checkpoint-4")
    assert [*Path(found).glob("transformer@frozen.*.safetensors")]
    opened, about = transformers.AutoModelForCausalLM.from_pretrained(
        found, output_loading_info=True
    )
    assert not any(about[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert equal(opened, first)
    second = model(2)
    a_trainer(run, model=second, args={"max_steps": 4}).train(
        resume_from_checkpoint=str(run / "checkpoint-2")
    )
    assert equal(first, second)


# Options ------------------------------------------------------------------------------------------


def test_a_compiled_model_is_saved_as_the_model_that_it_was(tmp_path: Path):
    run = tmp_path / "run"
    # whose names a compiled model does not tell
    args = {"max_steps": 4, "remove_unused_columns": False}
    first: Any = torch.compile(a_model(1), backend="eager")
    a_trainer(run, model=first, args=args).train()
    opened = transformers.AutoModelForCausalLM.from_pretrained(run / "checkpoint-4")
    assert equal(opened, first._orig_mod)
    second = a_model(2)
    a_trainer(run, model=second, args=args).train(resume_from_checkpoint=str(run / "checkpoint-2"))
    assert equal(second, first._orig_mod)


class Rising:
    """Metrics of which the second evaluation is the best."""

    def __init__(self, values: Sequence[float]) -> None:
        self.values = iter(values)

    def __call__(self, prediction: Any) -> dict[str, float]:
        return {"score": next(self.values)}


def evaluated(run: Path, api: str, values: Sequence[float], **args: Any) -> Any:
    wanted = {
        "eval_strategy": "steps",
        "eval_steps": 2,
        "metric_for_best_model": "score",
        "greater_is_better": True,
    }
    return a_trainer(
        run,
        api,
        eval_dataset=a_dataset(2),
        compute_metrics=Rising(values),
        preprocess_logits_for_metrics=lambda logits, labels: logits.argmax(-1),
        args={**wanted, **args},
    )


@pytest.mark.parametrize("limit", [1, 2, 3, None])
def test_save_total_limit_and_the_best_model_are_as_the_trainers_own(
    limit: int | None, tmp_path: Path
):
    kept: list[set[str]] = []
    models: list[Any] = []
    for api in ("stock", "ours"):
        run = tmp_path / api
        trainer = evaluated(
            run, api, [1, 5, 3, 2], save_total_limit=limit, load_best_model_at_end=True
        )
        trainer.train()
        assert Path(trainer.state.best_model_checkpoint) == run / "checkpoint-4"
        models.append(trainer.model)
        kept.append({each.name for each in run.glob("checkpoint-*")})
    assert equal(*models)
    # without which nothing could go on from here
    newest = {"checkpoint-8"} if limit == 1 else set()
    assert kept[1] == kept[0] | newest
    assert {info.step for info in sidesave.find(tmp_path / "ours")} == {
        int(name[11:]) for name in kept[1]
    }
    assert whole(tmp_path / "ours")


def test_a_checkpoint_of_the_model_only_has_no_optimizer(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    run = tmp_path / "run"
    a_trainer(run, args={"max_steps": 2, "save_only_model": True}).train()
    assert set(sidesave.load(run)) == {"transformer", "lm_head"}
    trainer = a_trainer(run, args={"max_steps": 4})
    trainer.train(resume_from_checkpoint=True)
    assert trainer.state.global_step == 4
    assert "was saved without trainer-optimizer, trainer-scheduler, trainer-random" in caplog.text


def test_options_of_the_checkpointer_are_passed_on(tmp_path: Path):
    run, mirror = tmp_path / "run", tmp_path / "mirror"
    trainer = a_trainer(run, args={"max_steps": 2}, sidesave_options={"mirror": mirror})
    trainer.train()
    with sidesave.Checkpointer(run, mirror=mirror) as ckpt:
        ckpt.wait(mirrored=True)
    assert sidesave.verify(mirror / "step-00000002").ok


# Going on -----------------------------------------------------------------------------------------


def straight(tmp_path: Path, until: int = 8) -> dict[int, str]:
    """The losses of the trainer itself without an interruption."""
    a_trainer(
        tmp_path / "straight", "stock", args={"max_steps": until, "save_strategy": "no"}
    ).train()
    return losses(tmp_path / "straight")


def test_a_run_goes_back_to_an_earlier_checkpoint_and_on_from_there(tmp_path: Path):
    run = tmp_path / "run"
    a_trainer(run).train()
    first = losses(run)
    trainer = a_trainer(run, args={"max_steps": 6})
    trainer.train(resume_from_checkpoint=str(run / "checkpoint-2"))
    assert losses(run) == first == straight(tmp_path)
    assert links(run) == {f"checkpoint-{step}": f"step-{step:08d}" for step in (2, 4, 6)}
    latest = sidesave.latest(run)
    assert latest is not None
    assert latest.step == 6


def test_a_run_of_the_trainer_itself_is_gone_on_with_in_the_middle(tmp_path: Path):
    run = tmp_path / "run"
    a_trainer(run, "stock", args={"max_steps": 4}).train()
    a_trainer(run, args={"max_steps": 6}).train(resume_from_checkpoint=True)
    assert set(links(run)) == {"checkpoint-6"}
    a_trainer(run).train(resume_from_checkpoint=True)
    assert losses(run) == straight(tmp_path)


def test_a_checkpoint_of_another_run_is_started_from(tmp_path: Path):
    a_trainer(tmp_path / "one", args={"max_steps": 4}).train()
    a_trainer(tmp_path / "two").train(resume_from_checkpoint=str(tmp_path / "one" / "checkpoint-4"))
    assert losses(tmp_path / "two") == {
        step: loss for step, loss in straight(tmp_path).items() if step > 4
    }


def test_resuming_without_a_checkpoint_is_an_error_as_ever(tmp_path: Path):
    with pytest.raises(ValueError, match="No valid checkpoint found"):
        a_trainer(tmp_path / "run").train(resume_from_checkpoint=True)


@pytest.mark.parametrize("how", ["within", "staged", "all"])
def test_a_killed_trainer_goes_on_as_one_that_saves_by_itself(how: str, tmp_path: Path):
    expected = straight(tmp_path)
    # the trainer's own cannot go on from a half
    apis = ("ours", "stock") if how == "staged" else ("ours",)
    for api in apis:
        run = tmp_path / api
        start("run_trainer", run, api, kill_at=6, how=how, died=True)
        assert api == "stock" or whole(run)
        start("run_trainer", run, api, resume=True)
        assert losses(run) == expected
    run = tmp_path / "ours"
    assert links(run) == {f"checkpoint-{step}": f"step-{step:08d}" for step in (2, 4, 6, 8)}
    assert whole(run)


def test_the_trainers_own_save_is_half_written_where_ours_is_not(tmp_path: Path):
    run = tmp_path / "run"
    start("run_trainer", run, "stock", kill_at=6, how="within", died=True)
    assert transformers.trainer_utils.get_last_checkpoint(str(run)) == str(run / "checkpoint-6")
    assert not (run / "checkpoint-6" / "trainer_state.json").exists()
    trainer = a_trainer(run, args={"max_steps": 8})  # which finds the one before
    trainer.train(resume_from_checkpoint=True)
    assert losses(run) == straight(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_ranks_that_are_killed_go_on_as_those_that_save_by_themselves(kind: str, tmp_path: Path):
    found: dict[str, dict[int, str]] = {}
    orders: dict[str, Any] = {"size": 2, "kind": kind, "args": {"max_steps": 6}}
    for api in ("stock", "ours"):
        run = tmp_path / api
        start("run_trainer", run, api, kill_at=4, how="staged", died=True, **orders)
        assert api == "stock" or whole(run)
        start("run_trainer", run, api, resume=True, **orders)
        found[api] = losses(run)
    assert found["ours"] == found["stock"]
    assert [*found["ours"]] == [1, 2, 3, 4, 5, 6]
    run = tmp_path / "ours"
    assert set(links(run)) == {f"checkpoint-{step}" for step in (2, 4, 6)}
    assert whole(run)
    if kind == "fsdp":
        sidesave.export(run, tmp_path / "exported", item="model")
        model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "exported")
        assert sidesave.load(run)["model"].keys() == model.state_dict().keys()
        words = "transformer.wte.weight"
        # a shard of it
        with safe_open(run / "checkpoint-6" / "model.rank-00001.safetensors", "pt") as file:
            assert (
                2 * file.get_tensor(f"model.{words}").numel() == model.state_dict()[words].numel()
            )
        return
    for last in ("checkpoint-6", "checkpoint-2"):
        models = [
            transformers.AutoModelForCausalLM.from_pretrained(tmp_path / api / last)
            for api in ("stock", "ours")
        ]
        assert equal(*models)


# What is refused ----------------------------------------------------------------------------------


def refused(trainer: Any, match: str) -> None:
    with pytest.raises(InvalidArgumentError, match=match):
        trainer.train()


def test_what_is_not_saved_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    run = tmp_path / "run"
    for name, value, match in (
        ("is_deepspeed_enabled", True, "DeepSpeed"),
        ("is_fsdp_enabled", True, "FSDP of version 1"),
        ("is_fsdp_xla_enabled", True, "XLA"),
        ("hp_search_backend", "optuna", "hyperparameter search"),
    ):
        trainer = a_trainer(run)
        monkeypatch.setattr(trainer, name, value)
        refused(trainer, match)
    for name in ("is_sagemaker_mp_enabled", "is_torch_xla_available"):
        with monkeypatch.context() as patch:
            patch.setattr(transformers.utils, name, lambda: True)
            refused(a_trainer(run), "SageMaker|XLA")
    for args, match in (
        ({"enable_jit_checkpoint": True}, "enable_jit_checkpoint"),
        ({"save_on_each_node": True}, "save_on_each_node"),
    ):
        refused(a_trainer(run, args=args), match)
    trainer = a_trainer(run)
    trainer.args.push_to_hub = True
    refused(trainer, "push_to_hub")
    trainer = a_trainer(run)
    trainer.model._hf_peft_config_loaded = True
    refused(trainer, r"adapters of model\.add_adapter")
    kind = type("PeftModel", (torch.nn.Module,), {"__module__": "peft.peft_model"})
    trainer = a_trainer(run)
    monkeypatch.setattr(trainer, "model", kind())
    refused(trainer, "a PEFT model")
    assert not run.exists() or not sidesave.find(run)


def derived(**methods: Any) -> Any:
    """A trainer's class with methods that call on, between the mixin and the stock trainer."""
    from sidesave.integrations.transformers import SidesaveTrainerMixin

    return type(
        "MyTrainer", (SidesaveTrainerMixin, type("Between", (transformers.Trainer,), methods)), {}
    )


def made_by(kind: Any, run: Path, **given: Any) -> Any:
    stock = a_trainer(run, "stock", args={"max_steps": 4})
    return kind(model=a_model(), args=stock.args, train_dataset=a_dataset(), **given)


@pytest.mark.parametrize("name", ["_save", "save_model"])
def test_files_that_a_subclass_writes_with_the_model_are_in_each_checkpoint(
    name: str, tmp_path: Path
):
    def write(self: Any, output_dir: Any = None, *args: Any, **options: Any) -> None:
        getattr(transformers.Trainer, name)(self, output_dir, *args, **options)
        assert (Path(output_dir) / "config.json").exists()
        (Path(output_dir) / "parts").mkdir()
        (Path(output_dir) / "parts" / "head.bin").write_text(f"values of {self.state.global_step}")

    run = tmp_path / "run"
    trainer = made_by(
        derived(**{name: write}), run, processing_class=two_templates(), data_collator=stack
    )
    trainer.train()
    for step in (2, 4):
        found = run / f"checkpoint-{step}"
        assert (found / "parts" / "head.bin").read_text() == f"values of {step}"
        assert sidesave.verify(found).ok
    assert equal(
        transformers.AutoModelForCausalLM.from_pretrained(run / "checkpoint-4"), trainer.model
    )
    assert transformers.AutoTokenizer.from_pretrained(
        run / "checkpoint-4"
    ).chat_template.keys() == {
        "default",
        "tool_use",
    }
    assert not (run / "checkpoint-4" / "training_args.bin").exists()
    trainer.save_model(tmp_path / "by hand")  # with the weights
    assert (tmp_path / "by hand" / "model.safetensors").stat().st_size > 1000


def test_a_subclass_that_writes_what_cannot_be_in_a_checkpoint_is_refused_before_training(
    tmp_path: Path,
):
    def write(self: Any, output_dir: Any = None, state_dict: Any = None) -> None:
        (Path(output_dir) / "value_head.safetensors").write_text("values")

    trainer = made_by(derived(_save=write), tmp_path / "run")
    refused(trainer, r"value_head\.safetensors")
    assert trainer.state.global_step == 0


SAVERS = ["_save_checkpoint", "_save_optimizer_and_scheduler", "_save_scaler", "_save_rng_state"]
LOADERS = [
    "_load_from_checkpoint",
    "_load_optimizer_and_scheduler",
    "_load_scaler",
    "_load_rng_state",
]


@pytest.mark.parametrize("name", [*SAVERS, *LOADERS, "_load_best_model"])
def test_overrides_that_would_not_be_called_are_refused_by_name(name: str, tmp_path: Path):
    def method(self: Any, *args: Any, **options: Any) -> Any:
        return getattr(super(between, self), name)(*args, **options)

    kind = derived(**{name: method})
    between = kind.__mro__[2]
    refused(made_by(kind, tmp_path / "run"), rf"Between\.{name} would|files of Between\.{name}")
    between = first = cast("Any", type("First", (derived(),), {name: method}))
    if name in SAVERS:
        refused(made_by(first, tmp_path / "run"), rf"files of First\.{name}")
    else:
        made_by(first, tmp_path / "run").train()


def test_a_directory_that_a_callback_makes_of_a_checkpoints_name_is_an_error_at_that_save(
    tmp_path: Path,
):
    class Saves(transformers.TrainerCallback):
        def on_save(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
            folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
            folder.mkdir()
            (folder / "adapter.bin").write_text("values")

    trainer = made_by(derived(), tmp_path / "run", callbacks=[Saves()])
    refused(trainer, r"checkpoint-2 was made by a callback \(.*Saves\)")
    assert trainer.state.global_step == 2


def test_a_class_that_is_no_trainer_is_refused():
    from sidesave.integrations.transformers import SidesaveTrainerMixin

    class Alone(SidesaveTrainerMixin):
        pass

    with pytest.raises(InvalidArgumentError, match="put it before"):
        Alone()


class Odd:
    """No plain data, and nothing with a state."""

    def __init__(self) -> None:
        self.number = 3


def test_values_that_cannot_be_represented_are_refused_before_training_unless_they_may_be_pickled(
    tmp_path: Path,
):
    def trained(run: Path, **options: Any) -> Any:
        model = a_model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        scheduler: Any = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
        scheduler.odd = Odd()
        trainer = a_trainer(
            run, model=model, optimizers=(optimizer, scheduler), args={"max_steps": 2}, **options
        )
        trainer.train()
        return trainer

    with pytest.raises(
        UnsupportedValueError, match=r"trainer-scheduler\.odd: a .*Odd cannot be saved"
    ):
        trained(tmp_path / "run")
    assert not (tmp_path / "run.losses").exists()
    trained(tmp_path / "run", sidesave_options={"allow_pickle": True})
    state = sidesave.load(tmp_path / "run", allow_pickle=True)
    assert state["trainer-scheduler"]["odd"].number == 3


@pytest.mark.slow
def test_the_script_of_the_guide_can_be_killed_and_goes_on(tmp_path: Path):
    guides.kill_and_run_again("transformers", tmp_path)
