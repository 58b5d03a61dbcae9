"""Make, join and remove the network namespaces of the lab.

Names are `gsm-PID-START-SERIAL-PART`. The pid and start time of the launcher show whether it is still alive, so the
namespaces of a killed run are found and removed, and labs of several processes do not collide. The bridge has its own
namespace, so the network of the host does not change.
"""

from __future__ import annotations

import ctypes
import itertools
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gossamer.errors import GossamerError, InputError
from gossamer.lab.shaping import HUB_ADDRESS, NETWORK, LinkRates, address, reshape, shape

PREFIX = "gsm-"
DEVICE = "lab0"  # the interface of a node, with the same name in every namespace
BRIDGE = "br0"  # joins the nodes, in its own namespace and with its own address
DISABLED, FORWARDING = 0, 3  # states of a port of the bridge; a disabled port drops packets silently
NETNS = Path("/var/run/netns")
# Linux's default. A namespace would inherit the host's choice, and results would depend on it: under bbr, for example,
# two workers that send to each other get unequal shares of a slow link.
CONGESTION_CONTROL = "cubic"
AVAILABLE = Path("/proc/sys/net/ipv4/tcp_available_congestion_control")
CLONE_NEWNET = 0x40000000
_serial = itertools.count()


class LabUnavailable(GossamerError):
    """This machine cannot make the network that was requested."""


def why_unavailable() -> str | None:
    """Why network namespaces cannot be used on this machine, and what to do about it; None if they can be used."""
    if sys.platform != "linux":
        return f"shaped links need Linux, this is {sys.platform}"
    missing = [tool for tool in ("ip", "tc") if find_tool(tool) is None]
    if missing:
        return f"shaped links need `{'` and `'.join(missing)}`; install iproute2"
    if os.geteuid() != 0:
        return "shaped links need root; run with sudo"
    return None


def start_time(pid: int | str) -> str | None:
    """When a process started, in kernel ticks; with the pid this identifies a process. None if it does not run."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else fields[19]


def leftovers() -> list[str]:
    """The namespaces of labs whose launcher no longer runs."""
    if not NETNS.is_dir():
        return []
    names = [p.name for p in NETNS.iterdir() if p.name.startswith(PREFIX) and p.name.count("-") == 4]
    return sorted(n for n in names if start_time(n.split("-")[1]) != n.split("-")[2])


def remove(names: Sequence[str]) -> None:
    """Delete namespaces with their devices and queues; missing namespaces are ignored."""
    if names:
        batch = "".join(f"netns del {name}\n" for name in names)
        subprocess.run([_need("ip"), "-force", "-batch", "-"], input=batch, text=True, capture_output=True)


def clean_up() -> list[str]:
    """Remove the namespaces of labs whose launcher no longer runs; return their names."""
    names = leftovers()
    remove(names)
    return names


def enter_namespace(name: str) -> None:
    """Move the calling thread into a network namespace (`os.setns` needs Python 3.12)."""
    descriptor = os.open(NETNS / name, os.O_RDONLY | os.O_CLOEXEC)
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.setns(descriptor, CLONE_NEWNET) != 0:
            number = ctypes.get_errno()
            raise OSError(number, f"cannot enter network namespace {name}: {os.strerror(number)}")
    finally:
        os.close(descriptor)


class Namespaces:
    """One namespace per node, and one for the bridge that joins them."""

    def __init__(self, nodes: int, links: LinkRates) -> None:
        self.links = links
        self.tag = f"{PREFIX}{os.getpid()}-{start_time(os.getpid())}-{next(_serial)}"
        self.hub = f"{self.tag}-hub"
        self.names = [f"{self.tag}-n{node}" for node in range(nodes)]
        self._silenced: set[int] = set()
        self._parted: frozenset[int] = frozenset()
        try:
            self._make()
        except BaseException:
            self.remove()
            raise

    def _make(self) -> None:
        _batch("ip", None, [f"netns add {name}" for name in (self.hub, *self.names)])
        hub = [
            f"link add {BRIDGE} type bridge",
            f"link set {BRIDGE} addrgenmode none",
            f"addr add {HUB_ADDRESS}/24 dev {BRIDGE}",
            f"link set {BRIDGE} up",
            "link set lo up",
        ]
        ports: list[str] = []
        for node, name in enumerate(self.names):
            hub += [
                f"link add port{node} type veth peer name {DEVICE} netns {name}",
                f"link set port{node} addrgenmode none",
                f"link set port{node} master {BRIDGE} up",
            ]
            ports += shape(f"port{node}", self.links.default, self.links.of(node), "src")
        _batch("ip", self.hub, hub)
        _batch("tc", self.hub, ports)
        for node, name in enumerate(self.names):
            inside = [
                "link set lo up",
                f"link set {DEVICE} addrgenmode none",
                f"addr add {address(node)}/24 dev {DEVICE}",
                f"link set {DEVICE} up",
            ]
            if CONGESTION_CONTROL in AVAILABLE.read_text().split():
                # As an attribute of the route: a namespace may set its default only to what the host allows.
                route = f"{NETWORK} dev {DEVICE} proto kernel scope link src {address(node)}"
                inside.append(f"route replace {route} congctl {CONGESTION_CONTROL}")
            _batch("ip", name, inside)
            _batch("tc", name, shape(DEVICE, self.links.default, self.links.of(node), "dst"))

    def cut(self, node: int, *, silently: bool) -> None:
        """Cut a node off from the others: its link goes down, or (silently) all its packets are lost."""
        if silently:
            self._silenced.add(node)
            _batch("bridge", self.hub, [f"link set dev port{node} state {DISABLED}"])
        else:
            _batch("ip", self.hub, [f"link set dev port{node} down"])

    def mend(self, node: int) -> None:
        """Undo `cut`."""
        if node in self._silenced:
            self._silenced.remove(node)
            _batch("bridge", self.hub, [f"link set dev port{node} state {FORWARDING}"])
        else:
            _batch("ip", self.hub, [f"link set dev port{node} up"])

    def cut_pair(self, a: int, b: int) -> None:
        """Lose all packets between two nodes: isolated ports of a bridge reach only ports that are not isolated."""
        if self._parted:
            raise InputError(f"nodes {sorted(self._parted)} are cut off from each other already; mend them first")
        self._parted = frozenset((a, b))
        _batch("bridge", self.hub, [f"link set dev port{node} isolated on" for node in (a, b)])

    def mend_pair(self) -> None:
        """Undo `cut_pair`."""
        _batch("bridge", self.hub, [f"link set dev port{node} isolated off" for node in sorted(self._parted)])
        self._parted = frozenset()

    def slow(self, node: int, rate: float | None) -> None:
        """Change the rate of a node's link in both directions; None restores the original rate."""
        for inside, device, side in ((self.hub, f"port{node}", "src"), (self.names[node], DEVICE, "dst")):
            plain = shape(device, self.links.default, self.links.of(node), side)
            _batch("tc", inside, reshape(device, rate, plain))

    def remove(self) -> None:
        """Remove all namespaces, even if Ctrl-C interrupts the removal."""
        try:
            self._remove()
        except KeyboardInterrupt:
            self._remove()
            raise

    def _remove(self) -> None:
        remove([name for name in (*self.names, self.hub) if (NETNS / name).exists()])

    def traffic(self) -> list[dict[str, int]]:
        """What the kernel counted, per node: bytes `sent` and `received`, and packets `dropped` in both directions."""
        ports = {d["dev"]: d for d in _root_queues(self.hub)}
        counts = []
        for node, name in enumerate(self.names):
            own = next(d for d in _root_queues(name) if d["dev"] == DEVICE)
            port = ports[f"port{node}"]
            dropped = own.get("drops", 0) + port.get("drops", 0)
            counts.append({"sent": own.get("bytes", 0), "received": port.get("bytes", 0), "dropped": dropped})
        return counts


def _root_queues(name: str) -> list[dict[str, Any]]:
    text = _run([_need("tc"), "-n", name, "-s", "-j", "qdisc", "show"], None)
    return [queue for queue in json.loads(text) if queue.get("root")]


def _batch(tool: str, namespace: str | None, lines: Sequence[str]) -> None:
    if lines:
        inside = ["-n", namespace] if namespace else []
        _run([_need(tool), *inside, "-batch", "-"], "\n".join(lines) + "\n")


def _run(command: list[str], text: str | None) -> str:
    done = subprocess.run(command, input=text, text=True, capture_output=True)
    if done.returncode != 0:
        reason = " ".join(done.stderr.split()) or f"exit code {done.returncode}"
        raise LabUnavailable(
            f"the kernel refused the lab's network ({Path(command[0]).name}: {reason}); "
            'the kernel must support network namespaces, veth, bridge, tbf and htb; or use network="paced"'
        )
    return done.stdout


def find_tool(name: str) -> str | None:
    """Return the path of a program, also if PATH lacks the folders of system programs."""
    return shutil.which(name) or shutil.which(name, path="/usr/sbin:/sbin:/usr/bin:/bin")


def _need(name: str) -> str:
    return find_tool(name) or name
