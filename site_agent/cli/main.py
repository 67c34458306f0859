"""``site-agent``: the commands that a hospital gives. Results on stdout, narration on stderr, `next:` last.

Importing this imports no torch, gRPC, numpy or cryptography: help answers at once; each command loads what it needs.
"""

from typing import Annotated, Literal

import typer

from fl_algorithms.engine.hardware import MOST_WORKERS, DeviceName, Hardware
from site_agent.cli.audit import audit_app
from site_agent.cli.data import data_app, models_app, predict
from site_agent.cli.doctor import doctor
from site_agent.cli.joining import join
from site_agent.cli.options import State
from site_agent.cli.pack import pack
from site_agent.cli.page import page_app
from site_agent.cli.peers import peers_app
from site_agent.cli.policy import policy_app
from site_agent.cli.release import leave, reject, release
from site_agent.cli.service import joined
from site_agent.cli.setup import setup
from site_agent.cli.status import status, studies
from site_agent.cli.study import approve, preview, withdraw
from site_agent.cli.sums import check_sum
from wardround.cli import LogFormat, Metrics, Traces, application, run, say

app = application(
    "site-agent", "Train models with other hospitals. Patient records, private modules and keys stay here."
)
app.add_typer(data_app, name="data")
app.add_typer(models_app, name="models")
app.add_typer(policy_app, name="policy")
app.add_typer(audit_app, name="audit")
audit_app.command("pack")(pack)
audit_app.command("sum")(check_sum)
app.add_typer(peers_app, name="peers")
app.add_typer(page_app, name="page")

app.command("setup")(setup)
app.command("join")(join)
app.command("studies")(studies)
app.command("preview")(preview)
app.command("approve")(approve)


app.command("withdraw")(withdraw)
app.command("release")(release)
app.command("reject")(reject)
app.command("leave")(leave)


@app.command(name="run")
def serve(
    state: State,
    only: Annotated[
        Literal["gateway", "trainer"] | None,
        typer.Option(help="Run one of the two processes, where each has a user of its own."),
    ] = None,
    device: Annotated[
        DeviceName,
        typer.Option(envvar="WARDROUND_DEVICE", help="What the trainer trains on; auto is CUDA where there is a GPU."),
    ] = "cpu",
    workers: Annotated[
        int,
        typer.Option(
            min=0,
            max=MOST_WORKERS,
            envvar="WARDROUND_WORKERS",
            help="How many processes of the trainer read images ahead, where they do not fit the study's cache.",
        ),
    ] = 0,
    metrics: Metrics = "",
    traces: Traces = "",
    log_format: LogFormat = "text",
    trainer_idle_exit: Annotated[
        int,
        typer.Option(
            min=0,
            metavar="SECONDS",
            envvar="WARDROUND_TRAINER_IDLE_EXIT",
            help="End the trainer's worker when it had nothing to do for so long; 0: it stays. The next round waits "
            "some seconds for another.",
        ),
    ] = 0,
) -> None:
    """Run the service until SIGTERM: it takes assignments, trains, and sends what was approved. Prints `ready`."""
    from wardround.local.logs import use_format

    use_format(log_format)
    hardware = Hardware(device, workers)
    if only == "trainer":
        from site_agent.trainer.listener import listen_forever

        listen_forever(state, hardware, idle_s=trainer_idle_exit)
        return
    from site_agent.gateway.service import run as run_service

    here, _ = joined(state)
    if only is None:
        say("gateway and trainer run as one user; use --only gateway and --only trainer to keep them apart")
    idle = ["--trainer-idle-exit", str(trainer_idle_exit)] if trainer_idle_exit else []
    run_service(here, with_trainer=only is None, options=[*hardware.options, *idle], metrics=metrics, traces=traces)


app.command("status")(status)
app.command("doctor")(doctor)
app.command("predict")(predict)


def main() -> None:
    """The command ``site-agent``."""
    run(app)


if __name__ == "__main__":
    main()
