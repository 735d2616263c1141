"""schemathesis against a server: no request that it makes up from /openapi.json may meet a 5xx.

    make test-schemathesis ARGS="--examples 50"

It installs schemathesis into an environment of its own, whose packages others shall not depend on. All data is tried,
also what the schemas forbid. `/sleep` and `/wake_up` have a run of their own: an engine that sleeps answers 503, as it
should, to all that other runs are about. What follows `--` are options of `jpaged serve`.
"""

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.serving.server_process import KEY, OPTIONS, Server

SLEEPING = ("/sleep", "/wake_up")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schemathesis", default="schemathesis", help="the command")
    parser.add_argument("--examples", type=int, default=100, help="requests for each route and phase")
    parser.add_argument("--seed", type=int, default=0, help="of what is made up")
    parser.add_argument("serve_options", nargs="*", metavar="-- OPTION", help="options of the server")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        server = Server(Path(directory) / "log", *OPTIONS, *args.serve_options)
        try:
            command = [
                *(args.schemathesis, "run", f"{server.url}/openapi.json", "--checks", "not_a_server_error"),
                *("--max-examples", str(args.examples), "--seed", str(args.seed), "--request-timeout", "60"),
                *("--mode", "all", "--header", f"Authorization: Bearer {KEY}"),
            ]
            codes = []
            for choice in ("--exclude-path", "--include-path"):
                paths = [word for path in SLEEPING for word in (choice, path)]
                codes.append(subprocess.run([*command, *paths], check=False).returncode)
            if server.client.get("/health").status_code != 200:
                print("The server is not healthy any more:\n" + server.log.read_text(), file=sys.stderr)
                return 1
        finally:
            server.close()
    return max(codes)


if __name__ == "__main__":
    sys.exit(main())
