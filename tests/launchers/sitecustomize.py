"""Python imports this at its start: lets the stand-ins of launchers give every process the name of a host."""

import os
import socket

if "EMULATED_HOST" in os.environ:
    socket.gethostname = lambda: os.environ["EMULATED_HOST"]
