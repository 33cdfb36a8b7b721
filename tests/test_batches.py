"""Batches of every shape loaders give."""

from __future__ import annotations

from collections import namedtuple
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from transformers import BatchEncoding

from abnn.batches import device_of, inputs_of, split, to_device

X, Y = torch.rand(3, 2), torch.tensor([0, 1, 2])


@pytest.mark.parametrize("batch", [(X, Y), [X, Y], ({"x": X}, Y), ((X, X), Y)])
def test_a_pair_is_inputs_and_labels(batch: Any) -> None:
    inputs, labels = split(batch)
    assert inputs is batch[0]
    assert inputs_of(batch) is batch[0]
    assert torch.equal(labels, Y)


def test_the_last_of_many_is_the_labels() -> None:
    inputs, labels = split([X, X + 1, Y])
    assert isinstance(inputs, tuple)
    assert torch.equal(inputs[1], X + 1)
    assert torch.equal(labels, Y)


@pytest.mark.parametrize("key", ["labels", "label"])
@pytest.mark.parametrize("mapping", [dict, BatchEncoding])
def test_a_mapping_is_split_by_its_key(mapping: Any, key: str) -> None:
    inputs, labels = split(mapping({"input_ids": X, "attention_mask": X, key: Y}))
    assert set(inputs) == {"input_ids", "attention_mask"}
    assert torch.equal(labels, Y)


def test_a_data_loader_is_understood() -> None:
    inputs, labels = split(next(iter(DataLoader(TensorDataset(X, Y), batch_size=2))))
    assert torch.equal(inputs, X[:2])
    assert torch.equal(labels, Y[:2])


@pytest.mark.parametrize("batch", [X, (X,), [X], (X, Y)])
def test_inputs_need_no_labels(batch: Any) -> None:
    assert inputs_of(batch) is X


def test_a_mapping_without_labels_is_all_inputs() -> None:
    assert inputs_of({"pixel_values": X}) == {"pixel_values": X}


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32, torch.bool])
def test_narrow_labels_are_widened(dtype: torch.dtype) -> None:
    labels = split((X, Y.to(dtype)))[1]
    assert labels.dtype == torch.int64
    assert torch.equal(labels, Y.to(dtype).long())


@pytest.mark.parametrize("batch", [X, (X,), [], {"input_ids": X}, {"labels": None}, "text", None])
def test_a_batch_without_labels_is_refused(batch: Any) -> None:
    with pytest.raises(ValueError, match="no labels were found; give"):
        split(batch)


@pytest.mark.parametrize("labels", [Y.float(), [0, 1, 2], "cat"])
def test_labels_that_are_not_class_indices_are_refused(labels: Any) -> None:
    with pytest.raises(ValueError, match="give a tensor of class indices"):
        split((X, labels))


@pytest.mark.parametrize("batch", [(), {}, {"labels": Y}, "text", None])
def test_a_batch_without_inputs_is_refused(batch: Any) -> None:
    with pytest.raises(ValueError, match="no inputs were found; give"):
        inputs_of(batch)


def test_nested_inputs_are_moved() -> None:
    moved = to_device({"a": (X, [X, 5]), "b": "text"}, "meta")
    assert moved["a"][0].device.type == moved["a"][1][0].device.type == "meta"
    assert (moved["a"][1][1], moved["b"]) == (5, "text")


def test_a_named_tuple_is_moved_as_a_tuple() -> None:
    pair = namedtuple("pair", "left right")
    moved = to_device(pair(X, X), torch.device("meta"))
    assert isinstance(moved, tuple)
    assert moved[1].device.type == "meta"


def test_without_a_device_nothing_moves() -> None:
    inputs = {"x": X}
    assert to_device(inputs, None) is inputs


def test_the_device_is_that_of_the_parameters() -> None:
    assert device_of(nn.Linear(2, 2, device="meta")) == torch.device("meta")
    assert device_of(nn.Identity()) is None
    assert device_of(object()) is None
