"""A served demo model is used by agents' clients: tools, structured output, several dialects.

    make test-clients

The clients have an environment of their own (`--python`): nothing else shall depend on the packages that they bring.
"""

import argparse
import subprocess
import sys

from tests.support.served import serving


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", default=sys.executable, help="of the environment that has the clients")
    args = parser.parse_args()
    with serving([]) as server:
        model = server.get("/v1/models").json()["data"][0]["id"]
        command = [args.python, "-m", "tests.drills.agent_clients", "--url", server.url, "--model", model]
        return subprocess.run(command, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
