"""What Flower's SecAgg+ costs, beside ours: its own workflow and client code, in one process, without a network.

    python -m pip install --target DIR --no-deps flwr pycryptodome iterators pathspec
    PYTHONPATH=DIR python -m tools.evidence_secure_flower --sites 8 --elements 11700000

Written for flwr 1.42. Its legacy workflow runs over a grid that is one function: each message is copied, as a network
would, and that time is not counted. All sites share with all, as ours do, and none drops out. Then ours.
"""

import argparse
import copy
import time
from collections.abc import Iterable

import numpy as np
from flwr.client.mod import secaggplus_mod
from flwr.common import Code, ConfigRecord, Context, FitRes, Message, RecordDict, Status, ndarrays_to_parameters
from flwr.compat.common import recorddict_compat as compat
from flwr.server.client_manager import SimpleClientManager
from flwr.server.client_proxy import ClientProxy
from flwr.server.compat.legacy_context import LegacyContext
from flwr.server.strategy import FedAvg
from flwr.server.workflow.constant import MAIN_CONFIGS_RECORD, MAIN_PARAMS_RECORD, Key
from flwr.server.workflow.secure_aggregation.secaggplus_workflow import SecAggPlusWorkflow
from flwr.supercore.task_identity import TaskIdentity

from tools.evidence_secure import HEAD, rows


class Proxy(ClientProxy):
    """A node that is asked nothing by way of its proxy."""

    def __init__(self, node: int) -> None:
        super().__init__(str(node))
        self.node_id = node

    def _never(self, *_: object) -> None:
        raise NotImplementedError

    get_properties = get_parameters = fit = evaluate = reconnect = _never


class Grid:
    """Calls each node's client code, and counts the processor seconds of each."""

    def __init__(self, nodes: Iterable[int], result: FitRes) -> None:
        self.spent = dict.fromkeys(nodes, 0.0)
        self.uncounted = 0.0  # copies of messages, and what would be training
        self._result = result
        self._contexts = {node: context(node) for node in self.spent}

    def send_and_receive(self, messages: Iterable[Message], timeout: float | None = None) -> list[Message]:
        return [self._answer(message) for message in messages]

    def _answer(self, message: Message) -> Message:
        begun = time.process_time()
        message, node = copy.deepcopy(message), message.metadata.dst_node_id
        self.uncounted += time.process_time() - begun
        before, begun, TaskIdentity.node_id = self.uncounted, time.process_time(), node
        answer = secaggplus_mod(message, self._contexts[node], self._train)
        self.spent[node] += time.process_time() - begun - (self.uncounted - before)
        TaskIdentity.node_id = 0
        return answer

    def _train(self, message: Message, _: Context) -> Message:
        begun = time.process_time()
        answer = Message(compat.fitres_to_recorddict(self._result, keep_input=True), reply_to=message)
        self.uncounted += time.process_time() - begun
        return answer


def context(node: int) -> Context:
    return Context(run_id=1, node_id=node, node_config={}, state=RecordDict(), run_config={})


def measure(sites: int, elements: int) -> tuple[list[float], float]:
    """Processor seconds of each client, and of the server, for one round."""
    TaskIdentity.run_id, TaskIdentity.task_id, TaskIdentity.node_id = 1, 1, 0
    update = np.random.default_rng(1).uniform(-1, 1, elements).astype(np.float32)
    parameters = ndarrays_to_parameters([update])
    manager, nodes = SimpleClientManager(), range(1, sites + 1)
    for node in nodes:
        manager.register(Proxy(node))
    strategy = FedAvg(fraction_fit=1.0, min_fit_clients=sites, min_available_clients=sites)
    server = LegacyContext(context(0), strategy=strategy, client_manager=manager)
    server.state.config_records[MAIN_CONFIGS_RECORD] = ConfigRecord({Key.CURRENT_ROUND: 1})
    server.state.array_records[MAIN_PARAMS_RECORD] = compat.parameters_to_arrayrecord(parameters, keep_input=True)
    grid = Grid(nodes, FitRes(Status(Code.OK, ""), parameters, 100, {}))
    begun = time.process_time()
    SecAggPlusWorkflow(num_shares=1.0, reconstruction_threshold=0.75)(grid, server)
    total = time.process_time() - begun
    return sorted(grid.spent.values()), total - sum(grid.spent.values()) - grid.uncounted


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sites", type=int, default=8)
    parser.add_argument("--elements", type=int, default=11_700_000)
    asked = parser.parse_args()
    clients, server = measure(asked.sites, asked.elements)
    print(f"Flower: a client {clients[0]:.2f} to {clients[-1]:.2f} s, the server {server:.2f} s")
    print(HEAD)
    for line in rows((asked.sites,), (asked.elements,)):
        print(line)


if __name__ == "__main__":
    main()
