"""mlx-worker as on a Mac, with the launchctl that LAUNCHCTL names: for subprocesses."""

import os

from mlx_worker.cli import main
from mlx_worker.service import manager
from mlx_worker.service.launchd import Launchd
from tests.service.launchctl import UID

manager.manager = lambda: Launchd(launchctl=os.environ["LAUNCHCTL"], uid=UID)
main()
