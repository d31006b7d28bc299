"""A Spark job whose tasks say which device they have been given. Its arguments are the tasks, and their seconds."""

import os
import sys
import time
from collections.abc import Iterator

from pyspark import TaskContext
from pyspark.sql import SparkSession


def use_device(task: int, seconds: Iterator[float]) -> Iterator[str]:
    """Have the device of this task for so many seconds. The work of a real task stands here."""
    context = TaskContext.get()
    if context is None:
        raise RuntimeError("this runs in a task only")
    (gpu,) = context.resources()["gpu"].addresses
    line = f"task {task} attempt {context.attemptNumber()} has gpu {gpu} in process {os.getpid()}"
    print(line, flush=True)
    for duration in seconds:
        time.sleep(duration)
    yield line


def main(tasks: int, seconds: float) -> None:
    """Run so many tasks beside each other."""
    spark = SparkSession.builder.appName("devices").getOrCreate()
    numbers = spark.sparkContext.parallelize([seconds] * tasks, tasks)
    for line in numbers.mapPartitionsWithIndex(use_device).collect():
        print(line)
    spark.stop()


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]))
