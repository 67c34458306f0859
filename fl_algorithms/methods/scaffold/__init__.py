"""SCAFFOLD: its card and settings. No torch: ``client`` has what a site does.

``server`` has what the coordinator does.
"""

from fl_algorithms.methods.settings import MethodSettings, Rate
from fl_algorithms.rows import MethodRow


class ScaffoldSettings(MethodSettings):
    server_learning_rate: Rate = 1.0  # of the coordinator's step along the mean of the updates


ROWS = (
    MethodRow(
        name="scaffold",
        title="SCAFFOLD",
        paper="Karimireddy et al., ICML 2020, https://arxiv.org/abs/1910.06378",
        upload="the whole network, the change of the site's control variate",
        private="records, the control variate",
        client="fl_algorithms.methods.scaffold.client:scaffold",
        settings=ScaffoldSettings,
        server="fl_algorithms.methods.scaffold.server:scaffold",
        one_global_model=True,
        plain_sgd=True,
        differs="the running statistics of norm layers: plain means without control",
    ),
)
