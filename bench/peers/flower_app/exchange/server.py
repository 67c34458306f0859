"""The server: FedAvg over one array, with a time stamp at each round's beginning and end."""

import json
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, Context, Message
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

app = ServerApp()


class Stamped(FedAvg):
    """FedAvg that writes down when its rounds begin and end, and how many sites answered."""

    stamps: Path

    def mark(self, what: str, answered: int = 0) -> None:
        with self.stamps.open("a") as file:
            file.write(json.dumps([what, answered, time.time()]) + "\n")

    def configure_train(self, *args: Any, **fields: Any) -> Any:
        self.mark("begin")
        return super().configure_train(*args, **fields)

    def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> Any:
        answers = list(replies)
        found = super().aggregate_train(server_round, answers)
        self.mark("end", sum(answer.has_content() for answer in answers))
        return found


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run the rounds."""
    config = context.run_config
    sites = int(config["sites"])
    strategy = Stamped(fraction_train=1.0, fraction_evaluate=0.0, min_train_nodes=sites, min_available_nodes=sites)
    strategy.stamps = Path(str(config["stamps"]))
    values = np.random.default_rng(1).standard_normal(int(config["values"]), dtype=np.float32)
    model = ArrayRecord({"model": Array(values)})
    strategy.start(grid=grid, initial_arrays=model, num_rounds=int(config["rounds"]), timeout=900)
    strategy.mark("done")
