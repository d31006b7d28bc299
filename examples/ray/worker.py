"""Ray actors that score numbers: each node of the cluster has the devices that `outfitter run` got for it."""

import itertools
import os
import time

import ray


@ray.remote(num_gpus=1, max_restarts=-1, max_task_retries=-1)
class Scorer:
    def __init__(self) -> None:
        self.gpu = os.environ["CUDA_VISIBLE_DEVICES"]

    def score(self, number: int) -> str:
        return f"scored {number} on {self.gpu}"


if __name__ == "__main__":
    ray.init(address="auto", log_to_driver=False)
    scorers = [Scorer.remote() for _ in range(2)]
    for number in itertools.count(step=2):
        for line in ray.get([scorer.score.remote(number + i) for i, scorer in enumerate(scorers)]):
            print(line, flush=True)
        time.sleep(0.2)
