"""A load test: requests arrive at random times, so many a second, whatever the server makes of them."""

import subprocess
import sys

from servers import serving


def main() -> None:
    with serving() as url:
        for rate in ("10", "40"):
            print(f"{rate} requests a second:")
            command = [sys.executable, "-m", "quire.cli.main", "bench", "serve", "--url", url]
            command += ["--rate", rate, "--num-requests", "60", "--input-len", "64", "--output-len", "16"]
            subprocess.run(command, check=True)


if __name__ == "__main__":
    main()
