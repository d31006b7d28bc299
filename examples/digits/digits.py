"""Inference over scikit-learn's bundled digits with a one-layer network: two operators of one stream worker.

`scale` brings the pixels of each picture to 0 … 1, `classify` multiplies them with the network's weights and takes
the largest of ten scores. Both take their device from the worker's `RuntimeContext`: on a GPU through PyTorch where
there is one, `local_index` being what they select, and on the CPU through NumPy otherwise.

    outfitter run --resource gpu=1 -- python digits.py
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
from sklearn.datasets import load_digits

from outfitter import ExternalResourceInfos, OperatorContext, RuntimeContext

RESOURCE = "gpu"
BATCH = 64
TRAINED_ON = 1200
"""Pictures that the network is trained on; it never sees the others before it has to classify them."""


class Device(NamedTuple):
    """Where an operator computes. `place` brings an array there, `fetch` brings it back."""

    name: str
    place: Callable[[Any], Any]
    fetch: Callable[[Any], np.ndarray]


def device_of(infos: ExternalResourceInfos) -> Device:
    """The device that the infos name: the first one's `local_index` is its ordinal for CUDA."""
    cpu = Device("the CPU, with NumPy", np.asarray, np.asarray)
    if not infos:
        return cpu
    try:
        import torch
    except ModuleNotFoundError:
        return cpu
    if not torch.cuda.is_available():
        return cpu
    gpu = torch.device("cuda", int(infos[0]["local_index"]))
    return Device(
        f"{torch.cuda.get_device_name(gpu)} (cuda:{gpu.index}, {infos[0]['id']}), with PyTorch",
        lambda array: torch.as_tensor(array, dtype=torch.float32).to(gpu),
        lambda tensor: tensor.cpu().numpy(),
    )


class Operator:
    """A piece of user code with a device of its own: what it gets of its worker's devices is up to its context."""

    def __init__(self, name: str, context: OperatorContext) -> None:
        infos = context.get_external_resource_infos(RESOURCE)
        self.device = device_of(infos)
        held = ", ".join(info["id"] for info in infos)
        print(f"operator {name:8} has {held} and computes on {self.device.name}")


class Scale(Operator):
    """Pixels from 0 … 16 to 0 … 1. Pictures are rows of 64 pixels."""

    def __call__(self, pictures: np.ndarray) -> np.ndarray:
        return self.device.fetch(self.device.place(pictures) / 16)


class Classify(Operator):
    """The digit with the highest score: pictures (n, 64) to digits (n,). `weights` are (65, 10), the bias last."""

    def __init__(self, name: str, context: OperatorContext, weights: np.ndarray) -> None:
        super().__init__(name, context)
        self.weights = self.device.place(weights[:-1])
        self.bias = self.device.place(weights[-1])

    def __call__(self, pictures: np.ndarray) -> np.ndarray:
        scores = self.device.place(pictures) @ self.weights + self.bias
        return self.device.fetch(scores).argmax(axis=1)


def train(pictures: np.ndarray, digits: np.ndarray, *, steps: int = 400, rate: float = 1.0) -> np.ndarray:
    """The weights of the layer, by gradient descent on the cross-entropy. Takes well below a second."""
    inputs = np.hstack([pictures / 16, np.ones((len(pictures), 1))])
    wanted = np.eye(10)[digits]
    weights = np.zeros((inputs.shape[1], 10))
    for _ in range(steps):
        scores = inputs @ weights
        likely = np.exp(scores - scores.max(axis=1, keepdims=True))
        likely /= likely.sum(axis=1, keepdims=True)
        weights -= rate / len(inputs) * inputs.T @ (likely - wanted)
    return weights


def stream(pictures: np.ndarray, digits: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """The pictures in small batches, as they would come from a topic, with the right answers."""
    for start in range(0, len(pictures), BATCH):
        yield pictures[start : start + BATCH], digits[start : start + BATCH]


def main(arguments: list[str] | None = None, *, context: Callable[..., RuntimeContext] = RuntimeContext) -> float:
    """Classify the pictures that the network has not seen; return the share that is right."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--gpus", type=int, choices=(1, 2), default=1, help="1: both operators share one; 2: each has its own"
    )
    gpus = parser.parse_args(arguments).gpus
    shares = {"scale": {RESOURCE: 1}, "classify": {RESOURCE: 1}} if gpus == 2 else None

    pictures, digits = load_digits(return_X_y=True)
    weights = train(pictures[:TRAINED_ON], digits[:TRAINED_ON])

    with context({RESOURCE: gpus}, shares) as worker:
        os.environ.update(worker.env)  # before CUDA is first used: `local_index` counts what is visible then
        scale = Scale("scale", worker.for_operator("scale"))
        classify = Classify("classify", worker.for_operator("classify"), weights)
        unseen = slice(TRAINED_ON, None)
        right = sum(
            int((classify(scale(batch)) == answers).sum())
            for batch, answers in stream(pictures[unseen], digits[unseen])
        )
    accuracy = right / len(digits[unseen])
    print(f"{len(digits[unseen])} digits, {accuracy:.1%} of them right")
    return accuracy


if __name__ == "__main__":
    main()
