#!/usr/bin/env python3
"""Hold network frames back in user space (for kernels without sch_netem).

Makes one TAP interface in each of two network namespaces and carries frames
between them, each frame --ms later than it came, in both directions.  The
interfaces vanish when this process ends.  Standard library only; needs root
and /dev/net/tun.  ssh_bed.sh (delay, undelay) does the wiring around it.
"""

import argparse
import collections
import contextlib
import ctypes
import errno
import fcntl
import os
import select
import struct
import sys
import time

TUNSETIFF = 0x400454CA
IFF_TAP, IFF_NO_PI = 0x0002, 0x1000
CLONE_NEWNET = 0x40000000
libc = ctypes.CDLL(None, use_errno=True)


def tap(ns, name):
    """Open a new TAP interface of that name inside a named network namespace."""
    here = os.open("/proc/self/ns/net", os.O_RDONLY)
    there = os.open("/run/netns/" + ns, os.O_RDONLY)
    try:
        if libc.setns(there, CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "setns " + ns)
        fd = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        fcntl.ioctl(fd, TUNSETIFF, struct.pack("16sH", name.encode(), IFF_TAP | IFF_NO_PI))
        return fd
    finally:
        libc.setns(here, CLONE_NEWNET)
        os.close(here)
        os.close(there)


def carry(near, far, hold):
    """Move frames between two TAP devices, each `hold` seconds after it came; ends when a device vanishes."""
    queues = {near: collections.deque(), far: collections.deque()}  # destination -> (due, frame)
    other = {near: far, far: near}
    while True:
        due = [queue[0][0] for queue in queues.values() if queue]
        wait = max(0.0, min(due) - time.monotonic()) if due else 3600
        ready, _, _ = select.select([near, far], [], [], wait)
        now = time.monotonic()
        for device in ready:
            read_frames(device, queues[other[device]], now + hold)
        now = time.monotonic()
        for device, queue in queues.items():
            while queue and queue[0][0] <= now:
                frame = queue.popleft()[1]
                with contextlib.suppress(OSError):  # link down or queue full: lost, as on a wire
                    os.write(device, frame)


def read_frames(device, queue, due):
    """Queue what has arrived on a device, at most 256 frames."""
    for _ in range(256):
        try:
            queue.append((due, os.read(device, 65536)))
        except BlockingIOError:
            return
        except OSError as error:
            if error.errno == errno.EBADFD:
                sys.exit("interface gone")
            time.sleep(0.005)  # not up yet
            return


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--node-ns", required=True)
    parser.add_argument("--node-if", required=True)
    parser.add_argument("--switch-ns", required=True)
    parser.add_argument("--switch-if", required=True)
    parser.add_argument("--ms", type=float, required=True, help="one-way delay in milliseconds")
    options = parser.parse_args()
    near, far = tap(options.node_ns, options.node_if), tap(options.switch_ns, options.switch_if)
    print("ready", flush=True)
    carry(near, far, options.ms / 1000.0)


if __name__ == "__main__":
    main()
