"""TCP links between the members of an elastic job.

`Rendezvous` brings a worker into the job, `Membership` keeps track of who is in it, `TcpTransport` carries exchanges.
"""

from gossamer.comm.tcp.directory import GONE, DirectoryClient, HostedDirectory, Unreachable, look, settle
from gossamer.comm.tcp.edge_deadlines import SILENT
from gossamer.comm.tcp.frame import Ask, Refused, Verdict, digest, read_json, whole_numbers
from gossamer.comm.tcp.links import send_sign, send_state
from gossamer.comm.tcp.membership import Membership
from gossamer.comm.tcp.record import Member, Record
from gossamer.comm.tcp.rendezvous import Arrival, Rendezvous
from gossamer.comm.tcp.transport import TcpChannel, TcpTransport

__all__ = [
    "GONE",
    "SILENT",
    "Arrival",
    "Ask",
    "DirectoryClient",
    "HostedDirectory",
    "Member",
    "Membership",
    "Record",
    "Refused",
    "Rendezvous",
    "TcpChannel",
    "TcpTransport",
    "Unreachable",
    "Verdict",
    "digest",
    "look",
    "read_json",
    "send_sign",
    "send_state",
    "settle",
    "whole_numbers",
]
