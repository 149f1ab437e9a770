"""`torchrun -m mlactl.replay.dcp`: the command line of one rank. Not a service: it only starts `mlactl.cli.dcp`."""

import sys

from mlactl.cli.dcp import main

if __name__ == "__main__":
    sys.exit(main())
