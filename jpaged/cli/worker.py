"""`jpaged worker`: this host's part of a model over several hosts; requests enter at process 0."""

import argparse
from textwrap import dedent

from jpaged.api.config import EngineArgs
from jpaged.api.errors import InvalidParameterError
from jpaged.cli.options import add_debug_option


def add_command(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "worker",
        help="run this host's part of a model over several hosts",
        description="Run this host's part of a model over several hosts, until process 0 ends. What to run, process 0"
        " says; the model must be at the same path or hub id here.",
        epilog=dedent("""\
            example, on two hosts of 8 GPUs:
              host0$ jpaged chat --model DIR --tensor-parallel-size 16 \\
                         --coordinator-address host0:9000 --num-processes 2 --process-id 0
              host1$ jpaged worker --coordinator-address host0:9000 --num-processes 2 --process-id 1

            JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID say the same."""),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--coordinator-address", metavar="HOST:PORT", help="of process 0")
    parser.add_argument("--num-processes", type=int, metavar="N", help="process 0 included")
    parser.add_argument("--process-id", type=int, metavar="N", help="which of them this is")
    add_debug_option(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Returns when process 0 has ended."""
    from jpaged.executor.distributed import Cluster, run_worker

    names = ("coordinator_address", "num_processes", "process_id")
    cluster = Cluster.find(EngineArgs(**{name: getattr(args, name) for name in names}))
    if cluster is None:
        raise InvalidParameterError("num_processes must be at least 2 for a worker; give --num-processes.")
    run_worker(cluster)
    return 0
