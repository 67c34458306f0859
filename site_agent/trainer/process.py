"""The trainer's worker: isolate first, then import torch, then answer requests on an inherited socket.

    python -m site_agent.trainer.process --fd N --parent PID --state DIR [--warm] [--device NAME] [--workers N]

Started by ``handoff.Worker`` alone. It opens no socket, listens nowhere, and ends when its socket closes or the thread
that started it ends.
"""

from site_agent.trainer.isolation import kernel

# Nothing else is imported here: a second thread would make the isolation impossible.


def main() -> None:
    import argparse
    import signal

    parser = argparse.ArgumentParser(prog="site_agent.trainer.process", description="started by the trainer alone")
    parser.add_argument("--fd", type=int, required=True)
    parser.add_argument("--parent", type=int, required=True)
    parser.add_argument("--state", required=True)
    parser.add_argument("--warm", action="store_true")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--workers", type=int, default=0)
    options = parser.parse_args()

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C is for the parent, which ends this process
    in_force = kernel.isolate()
    kernel.die_with_parent(options.parent, signal.SIGKILL)

    from fl_algorithms.engine.hardware import Hardware
    from site_agent.trainer.serving import serve

    hardware = Hardware(options.device, options.workers)
    serve(options.fd, options.state, in_force, hardware, warm=options.warm)


if __name__ == "__main__":
    main()
