"""A PyFlink job in which each parallel subtask has a device of its own.

`--function` chooses what kind of function uses it: a ProcessFunction, a MapFunction, two chained functions that share
one device, or a ScalarFunction of the Table API.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from typing import Any

from pyflink.common import Types, WatermarkStrategy
from pyflink.datastream import DataStream, MapFunction, ProcessFunction, RuntimeContext, StreamExecutionEnvironment
from pyflink.datastream.connectors.number_seq import NumberSequenceSource
from pyflink.table import DataTypes, StreamTableEnvironment
from pyflink.table.expressions import col
from pyflink.table.udf import FunctionContext, ScalarFunction, udf

import outfitter


class Devices:
    """What the functions below have in common: one GPU for the life of the function, however that ends."""

    def enter(self, ctx: RuntimeContext | FunctionContext, **more: Any) -> None:
        """Wait for the GPU. `ends_with`: this process never outlives the task manager that it works for."""
        self.devices = outfitter.RuntimeContext(
            resources={"gpu": 1}, labels=outfitter.flink_labels(ctx), ends_with="java", **more
        ).enter_for(self)

    def score(self, number: int) -> str:
        """Compute: the sleep stands for that. The getter raises an error once the GPU may be somebody else's."""
        (gpu,) = self.devices.get_external_resource_infos("gpu")
        time.sleep(0.05)
        return f"{number} scored on {gpu['id']}"


class Score(Devices, ProcessFunction):
    def open(self, runtime_context: RuntimeContext) -> None:
        self.enter(runtime_context)

    def process_element(self, value: int, ctx: ProcessFunction.Context) -> Iterator[str]:  # noqa: ARG002
        yield self.score(value)


class ScoreMap(Devices, MapFunction):
    def open(self, runtime_context: RuntimeContext) -> None:
        self.enter(runtime_context)

    def map(self, value: int) -> str:
        return self.score(value)


class Prepare(Devices, MapFunction):
    """Comes before `ScoreShared` in the chain, in the same process, and uses the same GPU."""

    def open(self, runtime_context: RuntimeContext) -> None:
        self.enter(runtime_context, shared="scorer")

    def map(self, value: int) -> int:
        self.score(value)
        return value


class ScoreShared(ScoreMap):
    def open(self, runtime_context: RuntimeContext) -> None:
        self.enter(runtime_context, shared="scorer")


class ScoreTable(Devices, ScalarFunction):
    def open(self, function_context: FunctionContext) -> None:
        self.enter(function_context)

    def eval(self, number: int) -> str:
        return self.score(number)


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--function", choices=["process", "map", "chain", "table"], default="process")
    options.add_argument("--parallelism", type=int, default=2)
    options.add_argument("--last", type=int, default=2**60, help="the last number; the job ends after it")
    run(**vars(options.parse_args()))


def run(function: str, parallelism: int, last: int) -> None:
    """Build the job and submit it."""
    env = StreamExecutionEnvironment.get_execution_environment()
    env.set_parallelism(parallelism)
    numbers = env.from_source(NumberSequenceSource(0, last), WatermarkStrategy.no_watermarks(), "numbers", Types.LONG())
    if function == "table":
        score_table(env, numbers)
    elif function == "chain":
        numbers.map(Prepare(), Types.LONG()).map(ScoreShared(), Types.STRING()).print()
        env.execute("scores")
    elif function == "map":
        numbers.map(ScoreMap(), Types.STRING()).print()
        env.execute("scores")
    else:
        numbers.process(Score(), Types.STRING()).print()
        env.execute("scores")


def score_table(env: StreamExecutionEnvironment, numbers: DataStream) -> None:
    """The same with the Table API."""
    table = StreamTableEnvironment.create(env)
    score = udf(ScoreTable(), result_type=DataTypes.STRING())
    scores = table.from_data_stream(numbers).alias("number").select(score(col("number")))
    table.to_data_stream(scores).print()
    env.execute("scores")


if __name__ == "__main__":
    main()
