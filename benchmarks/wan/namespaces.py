"""Network namespaces that nobody has to remove, each with one TUN device into this process.

They have no name: a namespace lives as long as a process is in it or a descriptor of it is open, and a TUN
device as long as its descriptor. Whatever ends this process, even SIGKILL, takes both away. Others enter
through ``/proc/PID/fd/N``.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import socket
import struct
from pathlib import Path

from swarm.errors import UserError

CLONE_NEWUSER = 0x10000000
CLONE_NEWNET = 0x40000000
CAP_NET_ADMIN = 12
CAP_SYS_ADMIN = 21

# linux/if_tun.h
TUNSETIFF = 0x400454CA
TUNSETOFFLOAD = 0x400454D0
IFF_TUN = 0x0001
IFF_NO_PI = 0x1000
IFF_VNET_HDR = 0x4000
TUN_F_CSUM = 0x01
TUN_F_TSO4 = 0x02

# linux/sockios.h and linux/if.h
SIOCGIFFLAGS = 0x8913
SIOCSIFFLAGS = 0x8914
SIOCSIFADDR = 0x8916
SIOCSIFNETMASK = 0x891C
IFF_UP = 0x1

DEVICE = b"wan0"
NETMASK = "255.255.0.0"

NEED = "an emulated WAN needs root or unprivileged user namespaces"


def gain_rights() -> None:
    """Make sure that this process and its children may make network namespaces.

    A process without the capabilities enters a user namespace of its own, which only one without threads
    can: call this first of all. Raises UserError where the machine does not let it.
    """
    if all(_effective_capabilities() >> bit & 1 for bit in (CAP_NET_ADMIN, CAP_SYS_ADMIN)):
        return
    uid, gid = os.geteuid(), os.getegid()
    try:
        unshare(CLONE_NEWUSER)
        Path("/proc/self/uid_map").write_text(f"0 {uid} 1")
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/gid_map").write_text(f"0 {gid} 1")
    except OSError as error:
        raise UserError(f"{NEED} (unshare: {error.strerror}); run it as root") from None


def _effective_capabilities() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("CapEff:"):
            return int(line.split()[1], 16)
    return 0


def unshare(flags: int) -> None:
    """unshare(2) of this thread; the interpreter has it from 3.12 on. Raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(flags) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def new_host(address: str) -> tuple[int, int]:
    """(descriptor of a new network namespace, that of its TUN device); this thread is in the namespace.

    ``address`` is the device's; the 16 bits that it begins with lead to all other hosts. The device passes
    TCP in pieces of up to 64 KiB, each after a ``virtio_net_hdr``, and takes them back in the same form: one
    read and one write here for forty packets on the wire. Raises UserError in one line.
    """
    try:
        unshare(CLONE_NEWNET)
        namespace = os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
        device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        fcntl.ioctl(device, TUNSETIFF, struct.pack("16sH22x", DEVICE, IFF_TUN | IFF_NO_PI | IFF_VNET_HDR))
        fcntl.ioctl(device, TUNSETOFFLOAD, TUN_F_CSUM | TUN_F_TSO4)
        _configure(address)
    except OSError as error:
        raise UserError(f"{NEED}, and the right to open /dev/net/tun ({error.strerror})") from None
    return namespace, device


def _configure(address: str) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        _set(control, SIOCSIFADDR, DEVICE, _sockaddr(address))
        _set(control, SIOCSIFNETMASK, DEVICE, _sockaddr(NETMASK))
        for device in (b"lo", DEVICE):
            flags = struct.unpack_from("16xH", fcntl.ioctl(control, SIOCGIFFLAGS, _ifreq(device, b"")))[0]
            _set(control, SIOCSIFFLAGS, device, struct.pack("H", flags | IFF_UP))


def _set(control: socket.socket, request: int, device: bytes, value: bytes) -> None:
    fcntl.ioctl(control, request, _ifreq(device, value))


def _ifreq(device: bytes, value: bytes) -> bytes:
    """``struct ifreq`` of netdevice(7)."""
    return struct.pack("16s24s", device, value)


def _sockaddr(address: str) -> bytes:
    return struct.pack("HH4s8x", socket.AF_INET, 0, socket.inet_aton(address))
