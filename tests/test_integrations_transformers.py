"""The callback for transformers: what is fitted to what, what is left alone, what is refused."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler

import abnn
from fitting import banks, equal

transformers: Any = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from abnn.integrations.transformers import ABNNCallback, _of_all_processes  # noqa: E402

Rows = list[dict[str, Any]]


def bert(**options: Any) -> Any:
    """A classifier of texts, or of their tokens."""
    small = {"hidden_size": 8, "num_attention_heads": 2, "intermediate_size": 8}
    tokens = options.pop("tokens", False)
    config = transformers.BertConfig(
        vocab_size=20, num_hidden_layers=1, **({"num_labels": 3} | small | options)
    )
    kind = "BertForTokenClassification" if tokens else "BertForSequenceClassification"
    torch.manual_seed(0)
    return getattr(transformers, kind)(config)


def vit() -> Any:
    """A classifier of images."""
    small = {"hidden_size": 8, "num_attention_heads": 2, "intermediate_size": 8}
    config = transformers.ViTConfig(
        image_size=8, patch_size=4, num_hidden_layers=1, num_labels=3, **small
    )
    torch.manual_seed(0)
    return transformers.ViTForImageClassification(config)


def texts(rows: int = 16) -> Rows:
    torch.manual_seed(1)
    return [{"input_ids": torch.randint(20, (6,)), "labels": i % 3} for i in range(rows)]


def tagged(rows: int = 16) -> Rows:
    """Texts with a label at every second word."""
    tags = torch.tensor([-100, 0, -100, 1, -100, 2])
    return [{**row, "labels": tags} for row in texts(rows)]


def images(rows: int = 16) -> Rows:
    torch.manual_seed(1)
    return [{"pixel_values": torch.randn(3, 8, 8), "labels": i % 3} for i in range(rows)]


@pytest.fixture
def trainer(tmp_path: Path) -> Any:
    """Makes Trainers that write nothing but where they are told, and print nothing."""

    def make(net: Any, rows: Any, *callbacks: Any, eval_dataset: Any = None, **more: Any) -> Any:
        quiet = {"disable_tqdm": True, "report_to": "none", "logging_strategy": "no"}
        given = {"num_train_epochs": 1, "per_device_train_batch_size": 4, "save_strategy": "no"}
        arguments = transformers.TrainingArguments(
            str(tmp_path / "out"), use_cpu=True, **(given | quiet | more)
        )
        made = transformers.Trainer(
            net, arguments, train_dataset=rows, eval_dataset=eval_dataset, callbacks=[*callbacks]
        )
        made.remove_callback(transformers.PrinterCallback)
        return made

    return make


def small(**options: Any) -> ABNNCallback:
    return ABNNCallback(**({"modes": 2, "alpha": 0.001, "epochs": 1, "lr": 0.05} | options))


@pytest.mark.parametrize(
    ("model", "rows", "options"),
    [(bert, texts, {}), (vit, images, {}), (lambda: bert(tokens=True), tagged, {"class_dim": -1})],
    ids=["texts", "images", "tokens"],
)
def test_a_trained_network_becomes_bayesian(
    model: Any, rows: Any, options: Any, trainer: Any, tmp_path: Path
) -> None:
    callback, net = small(**options), model()
    made = trainer(net, rows(), callback, eval_dataset=rows(9), eval_strategy="epoch")
    made.train()
    assert callback.run is not None
    assert callback.bnn is not None
    assert callback.run.parent == tmp_path / "out"
    assert equal(banks(abnn.load(callback.run, net)), banks(callback.bnn))
    assert callback.result is not None
    assert callback.result.whole is not None
    assert callback.result.original is not None
    # Of the words, those with a label of -100 are not counted.
    assert callback.result.whole.n == (27 if rows is tagged else 9)
    logged = made.state.log_history[-1]
    assert logged["abnn/all_modes/nll"] == callback.result.whole.nll
    assert logged["abnn/original/accuracy"] == callback.result.original.accuracy
    assert logged["step"] == 4


def test_the_network_and_the_random_numbers_stay_as_they_are(trainer: Any) -> None:
    there: dict[str, Any] = {}

    class Before(transformers.TrainerCallback):  # type: ignore[misc]
        def on_train_end(self, *_: Any, model: Any, **__: Any) -> None:
            there.update({name: value.clone() for name, value in model.state_dict().items()})
            there["training"] = [part.training for part in model.modules()]
            there["random"] = torch.get_rng_state()

    net = bert()
    trainer(net, texts(), Before(), small(), eval_dataset=texts(9), eval_strategy="epoch").train()
    assert torch.equal(torch.get_rng_state(), there.pop("random"))
    assert [part.training for part in net.modules()] == there.pop("training")
    assert equal(net.state_dict(), there)


class Dies(list[dict[str, Any]]):
    """Data of which a row can't be read, when it is asked for the so many-th time."""

    left = 10**9

    def __getitem__(self, index: Any) -> Any:
        self.left -= 1
        if self.left == 0:
            raise ConnectionError("the disk is gone")
        return super().__getitem__(index)


def test_a_fit_that_was_killed_goes_on_with_the_training_resumed(
    trainer: Any, tmp_path: Path
) -> None:
    broken, options = Dies(texts()), {"epochs": 2, "checkpoint_seconds": 0}
    broken.left = 2 * 16 + 10  # two epochs of training, and two batches of the fit
    epochs = {"num_train_epochs": 2, "save_strategy": "epoch"}
    with pytest.raises(ConnectionError):
        trainer(bert(), broken, small(**options), **epochs).train()
    (checkpoint,) = (tmp_path / "out").glob("abnn-*/checkpoint.safetensors")
    held_out = [{"input_ids": torch.zeros(9, 6).long(), "labels": torch.arange(9) % 3}]
    callback, net = small(**options, validation=held_out), bert()
    made = trainer(net, Dies(texts()), callback, **epochs)
    made.train(resume_from_checkpoint=True)
    assert callback.run == checkpoint.parent

    straight = small(**options, run=tmp_path / "straight")
    straight.fit(made)
    assert straight.bnn is not None
    assert callback.bnn is not None
    assert equal(banks(callback.bnn), banks(straight.bnn))
    assert callback.result is not None
    assert straight.result is not None
    assert torch.equal(callback.result.losses, straight.result.losses)
    assert callback.result.whole is not None

    made.eval_dataset, later = texts(5), small(**options)
    assert later.fit(made) is not callback.bnn
    assert later.run == callback.run
    assert later.result is not None
    assert later.result.whole is not None
    assert later.result.whole.n == 5


def test_mixed_precision_is_of_the_training_alone(trainer: Any) -> None:
    callback, net = small(), bert()
    made = trainer(net, texts(), callback, bf16=True)
    made.train()
    assert callback.bnn is not None
    # What accelerate put around forward is still there, but not in the Bayesian network.
    assert "_original_forward" in vars(net)
    assert not {"forward", "_original_forward"} & vars(callback.bnn.backbone).keys()
    assert callback.bnn.predict({"input_ids": texts()[0]["input_ids"][None]}).probs.shape == (1, 3)


def test_it_can_be_had_on_demand(trainer: Any) -> None:
    made = trainer(bert(), texts(), eval_dataset={"one": texts(9), "two": texts(5)})
    callback = small()
    assert callback.fit(made) is callback.bnn
    assert callback.result is not None
    assert callback.result.whole is not None
    assert callback.result.whole.n == 9
    assert "abnn/all_modes/nll" in made.state.log_history[-1]


def test_processes_get_one_loader_with_as_large_a_batch() -> None:
    shard = pytest.importorskip("accelerate.data_loader").BatchSamplerShard
    batches = BatchSampler(SequentialSampler(range(10)), 2, drop_last=False)
    data: Any = range(10)
    for rank in range(2):
        prepared = DataLoader(data, batch_sampler=shard(batches, 2, rank))
        loader = _of_all_processes(prepared)
        assert [batch.tolist() for batch in loader] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]


@pytest.mark.parametrize(
    ("model", "options", "arguments", "sentence"),
    [
        (lambda: bert(problem_type="regression", num_labels=1), {}, {}, "is for regression"),
        (lambda: bert(), {"layers": "none"}, {}, "No norm matches layers='none'"),
        (lambda: bert(), {}, {"fsdp": "full_shard"}, "spread the network over processes"),
    ],
    ids=["regression", "layers", "fsdp"],
)
def test_a_mistake_is_told_before_the_training(
    model: Any, options: Any, arguments: Any, sentence: str
) -> None:
    given = SimpleNamespace(**arguments)
    with pytest.raises(ValueError, match=sentence):
        small(**options).on_train_begin(given, None, None, model(), [])


def test_a_search_of_hyper_parameters_is_left_alone() -> None:
    searching = SimpleNamespace(is_hyper_param_search=True)
    callback = small()
    callback.on_train_end(None, searching, None, bert(), None)
    assert callback.bnn is None
