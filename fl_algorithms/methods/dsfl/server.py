"""DS-FL's server aggregator: the mean of the sites' class probabilities, sharpened by entropy reduction (ERA).

    q = softmax(qbar / T)        of each row, with qbar the mean over the sites

The softmax is over probabilities, so a row that is nearly even may come out flatter. "mean" sends qbar as it is.

Itahara, Nishio, Koda, Morikura, Yamamoto, IEEE TMC 22(1), 2023, section 3.2. https://arxiv.org/abs/2008.06180
"""

import numpy as np

from fl_algorithms.methods.dsfl import DsFlSettings
from fl_algorithms.methods.fedmd.server import agreed
from fl_algorithms.server.aggregator import F64, Kept, Round, ServerAggregator, Specs, write_tensor
from fl_algorithms.study import ResolvedStudy


def dsfl(settings: DsFlSettings, study: ResolvedStudy, upload: Specs) -> ServerAggregator:
    """What is kept is what the last round made of the probabilities, (rows, classes)."""
    consensus = agreed(upload)

    def aggregate(round_: Round) -> None:
        for spec, sharpened in zip(upload, consensus, strict=True):
            classes = spec.shape[1]

            def new(start: int, count: int, key: str = spec.key, classes: int = classes) -> F64:
                first, last = start // classes, -(-(start + count) // classes)  # whole rows around the block
                mean = round_.uniform_delta(key, first * classes, (last - first) * classes)
                rows = mean.reshape(-1, classes)
                if settings.aggregation == "era":
                    rows = entropy_reduced(rows, settings.temperature)
                return rows.reshape(-1)[start - first * classes :][:count]

            write_tensor(sharpened, new, round_.sink)

    return ServerAggregator(upload, tuple(Kept(spec) for spec in consensus), consensus, aggregate)


def entropy_reduced(rows: F64, temperature: float) -> F64:
    """softmax(row / temperature) of each row."""
    with np.errstate(under="ignore"):
        raised = np.exp((rows - rows.max(axis=1, keepdims=True)) / temperature)
    found: F64 = raised / raised.sum(axis=1, keepdims=True)
    return found
