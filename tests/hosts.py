"""Runs a command over several test hosts that are made on this machine, as root.

    sudo .venv/bin/python tests/hosts.py --hosts 2 --ranks-per-host 2 -- python -m pytest -q --only-mpi
    sudo .venv/bin/python tests/hosts.py --rate 1gbit -- python -m collectives.bench all_reduce

A host is a set of Linux namespaces: its network, host name and /dev/shm are its own, the files and the cores are the
machine's. All hosts hang on one switch, and mpirun runs outside and starts ranks on the hosts as it would by ssh:

    switch    10.77.0.254    a bridge; mpirun
      |-- host1    10.77.0.1    ranks 0 .. r-1     each link full duplex, as fast as the machine or --rate
      |-- host2    10.77.0.2    ranks r .. 2r-1

Nothing of this has a name outside, so runs do not meet, and the machine's own network is not touched. It exists while
the processes in it do, and these are the children of one process that is killed with this one: whatever ends
this program, by kill -9 too, also ends all of its ranks and removes all of its hosts.

The exit status is the job's: that of a rank that failed; 2 if the hosts cannot be made.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

CANNOT = 2  # exit status; argparse's for wrong arguments, too
ADDRESS = "10.77.0.{}"
SWITCH = 254  # the last part of its address; the hosts count from 1

# setpriv has the kernel end unshare when this program ends, and --kill-child all that is inside when unshare does.
ISOLATED = shlex.split(
    "setpriv --pdeathsig KILL unshare --net --mount --ipc --uts --pid --fork --kill-child --mount-proc"
)
HOST = shlex.split("unshare --net --mount --ipc --uts")
ENTER = "--net --mount --ipc --uts"
INSIDE = "inside"  # the first argument of the program that ISOLATED starts

# Root, and more ranks than cores: Open MPI wants to be told that they are meant, in 5 and in 4. MPICH ignores these.
OPEN_MPI = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
}


class CannotError(Exception):
    """Hosts cannot be made here; the message says why, in one line."""


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--hosts", type=_number(SWITCH - 1), default=2, metavar="N", help="how many (2)")
    parser.add_argument("--ranks-per-host", type=_number(1024), default=2, metavar="N", help="how many (2)")
    parser.add_argument("--rate", type=_rate, help="limit of each link, in each direction: 1gbit, 100mbit; else none")
    parser.add_argument("--check", action="store_true", help="only say why hosts cannot be made; status 0 if they can")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="what each rank runs; `--` may stand before it")
    options = parser.parse_args(arguments)
    options.command = options.command[options.command[:1] == ["--"] :]
    if not options.command and not options.check:
        parser.error("there is no command to run")
    return options


def _number(most: int) -> Any:
    def convert(text: str) -> int:
        value = int(text)
        if not 1 <= value <= most:
            raise argparse.ArgumentTypeError(f"got {text}; needs 1 to {most}")
        return value

    convert.__name__ = "number"  # as argparse calls it
    return convert


def _rate(text: str) -> str:
    if not re.fullmatch(r"[1-9]\d*[kmg]?bit", text):
        raise argparse.ArgumentTypeError(f"got {text!r}; needs bits a second, such as 1gbit or 100mbit")
    return text


# ---- outside --------------------------------------------------------------------------------------------------------


def obstacle() -> str | None:
    """Why hosts cannot be made on this machine; None if they can."""
    if os.geteuid() != 0:
        return "only root can make them"
    for tool in ("ip", "tc", "mount", "nsenter", "setpriv", "unshare"):
        if not shutil.which(tool):
            return f"the program {tool} is missing (packages iproute2 and util-linux have it)"
    mpirun = shutil.which("mpirun", path=_environment(1)["PATH"])
    if mpirun is None or "HYDRA" not in subprocess.run([mpirun, "--version"], capture_output=True, text=True).stdout:
        return f"{mpirun or 'mpirun'} is not MPICH's"
    attempt = "mount -t tmpfs tmpfs /dev/shm && ip link add switch type bridge && ip link add host1 type veth"
    done = subprocess.run([*ISOLATED, "sh", "-c", attempt], stdin=subprocess.DEVNULL, capture_output=True, text=True)
    return f"namespaces are not allowed here: {_one_line(done.stderr)}" if done.returncode else None


def main(arguments: Sequence[str]) -> int:
    """Checks, and runs `inside` in namespaces of its own."""
    options = parse(arguments)
    reason = obstacle()
    if options.check:
        print(reason or "hosts can be made")
        return CANNOT if reason else 0
    if reason:
        raise CannotError(reason)
    signal.signal(signal.SIGTERM, _leave)
    process = subprocess.Popen([*ISOLATED, sys.executable, __file__, INSIDE, *arguments])
    try:
        return _status(process.wait())
    except KeyboardInterrupt:  # mpirun was interrupted with this program and ends its ranks
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(5)
        return 128 + signal.SIGINT
    finally:
        process.kill()
        process.wait()


def _leave(number: int, _: Any) -> NoReturn:
    raise SystemExit(128 + number)


# ---- inside ---------------------------------------------------------------------------------------------------------


def inside(options: argparse.Namespace) -> int:
    """Makes the switch and the hosts, in the namespaces that `main` made, and runs the job over them."""
    names = [f"host{number}" for number in range(1, options.hosts + 1)]
    _run("mount -t tmpfs tmpfs /dev/shm")
    folder = Path("/dev/shm/hosts")
    folder.mkdir()
    addresses = {"localhost": "127.0.0.1", "switch": ADDRESS.format(SWITCH)}
    addresses |= {name: ADDRESS.format(number) for number, name in enumerate(names, 1)}
    known = folder / "hosts"
    known.write_text("".join(f"{address} {name}\n" for name, address in addresses.items()))
    _run(f"mount --bind {known} /etc/hosts")
    _run("hostname switch")
    _run("ip link set lo up")
    _run("ip link add switch type bridge")
    _run(f"ip address add {addresses['switch']}/24 dev switch")
    _run("ip link set switch up")
    with contextlib.ExitStack() as holders:
        pids = {}
        for name in names:
            # Namespaces last as long as a process is in them. This one ends when its input does.
            holder = subprocess.Popen(
                [*HOST, "sh", "-c", "echo there && exec cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
            )
            holders.enter_context(holder)
            assert holder.stdout is not None
            if not holder.stdout.readline():
                raise CannotError(f"{name}: unshare failed")
            pids[name] = holder.pid
            _connect(name, holder.pid, addresses[name], options.rate)
        try:
            command, environment = _job(options, pids, folder)
            return _status(subprocess.call(command, env=environment))
        except KeyboardInterrupt:
            return 128 + signal.SIGINT


def _connect(name: str, pid: int, address: str, rate: str | None) -> None:
    """Gives the namespaces of process `pid` a name, memory to share, and a link to the switch."""
    enter = f"nsenter --target {pid} {ENTER}"
    _run(f"{enter} hostname {name}")
    _run(f"{enter} mount -t tmpfs tmpfs /dev/shm")
    _run(f"ip link add {name} type veth peer name eth0 netns {pid}")
    _run(f"ip link set {name} master switch up")
    _run(f"{enter} ip link set lo up")
    _run(f"{enter} ip address add {address}/24 dev eth0")
    _run(f"{enter} ip link set eth0 up")
    if rate:
        # A bucket of a few large segments, as the sender cuts none smaller, and a queue that TCP can fill.
        limit = f"root tbf rate {rate} burst 256kb limit 1mb"
        _run(f"tc qdisc add dev {name} {limit}")
        _run(f"{enter} tc qdisc add dev eth0 {limit}")


def _job(options: argparse.Namespace, pids: dict[str, int], folder: Path) -> tuple[list[str], dict[str, str]]:
    """mpirun's command line and environment."""
    environment = _environment(options.hosts * options.ranks_per_host)
    mpirun = shutil.which("mpirun", path=environment["PATH"])
    assert mpirun is not None, "as `obstacle` has found"
    launcher = folder / "ssh"
    for name, pid in pids.items():
        (folder / name).write_text(str(pid))
    launcher.write_text(
        '#!/bin/sh\n# ssh [options] host command...\nwhile [ "${1#-}" != "$1" ]; do shift; done\nhost=$1\nshift\n'
        f'exec nsenter --target "$(cat {folder}/"$host")" {ENTER} sh -c "$*"\n'
    )
    launcher.chmod(0o755)
    ranks = options.ranks_per_host
    where = ["-hosts", ",".join(pids), "-ppn", str(ranks), "-launcher", "ssh", "-launcher-exec", str(launcher)]
    return [mpirun, *where, "-n", str(ranks * options.hosts), *options.command], environment


def _environment(ranks: int) -> dict[str, str]:
    """The caller's variables; `python` and `mpirun` are those next to this program's interpreter.

    The hosts share the machine's cores and do not know it, so threads are counted out here.
    """
    own = str(Path(sys.executable).parent)
    threads = str(max(1, len(os.sched_getaffinity(0)) // ranks))
    environment = {"OMP_NUM_THREADS": threads, **OPEN_MPI, **os.environ}
    environment["PATH"] = os.pathsep.join([own, os.environ.get("PATH", os.defpath)])
    return environment


def _run(command: str) -> None:
    done = subprocess.run(shlex.split(command), stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if done.returncode:
        raise CannotError(f"{command}: {_one_line(done.stderr)}")


def _one_line(text: str) -> str:
    return text.strip().partition("\n")[0]


def _status(returned: int) -> int:
    """Converts a status to a shell's: 128 and the signal's number if a signal ended the process."""
    return returned if returned >= 0 else 128 - returned


if __name__ == "__main__":
    try:
        if sys.argv[1:2] == [INSIDE]:
            sys.exit(inside(parse(sys.argv[2:])))
        sys.exit(main(sys.argv[1:]))
    except CannotError as error:
        print(f"tests/hosts.py: no test hosts: {error}", file=sys.stderr)
        sys.exit(CANNOT)
