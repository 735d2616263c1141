"""schemathesis against a server: no request that it makes up from /openapi.json may meet a 5xx.

    make test-schemathesis ARGS="--examples 50"

It installs schemathesis into an environment of its own, whose packages others shall not depend on. All data is tried,
also what the schemas forbid. What follows `--` are options of `jpaged serve`.
"""

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.serving.server_process import KEY, OPTIONS, Server


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
            found = subprocess.run(
                [
                    *(args.schemathesis, "run", f"{server.url}/openapi.json", "--checks", "not_a_server_error"),
                    *("--max-examples", str(args.examples), "--seed", str(args.seed), "--request-timeout", "60"),
                    *("--mode", "all", "--header", f"Authorization: Bearer {KEY}"),
                ],
                check=False,
            )
            if server.client.get("/health").status_code != 200:
                print("The server is not healthy any more:\n" + server.log.read_text(), file=sys.stderr)
                return 1
        finally:
            server.close()
    return found.returncode


if __name__ == "__main__":
    sys.exit(main())
