"""Messages of the driver, CUDA, NCCL, network cards, the kernel and SLURM that say that something broke; what
each means and what to do.

Xid numbers are those of the catalog of NVIDIA (docs.nvidia.com/deploy/xid-errors, for Ampere and newer, read
in 2026). A number alone is a hint, not a proof: a broken GPU can make any of them, and so can a program that
writes where it should not.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

# In the order in which they are shown: what can be the cause of the others comes first.
CAUSES = ("hardware", "driver", "network", "memory", "disk", "program", "consequence")

DRAIN = "take the node out, and have it looked at"
RESET = "reset the GPU or restart the node; take it out if it comes again"
NETWORK = "look at the link, cable and switch of that node; take it out if it comes again"
PROGRAM = (
    "look at the program; CUDA_LAUNCH_BLOCKING=1 names the line. If one GPU alone has it again and again, it"
    " is the GPU"
)


@dataclass(frozen=True)
class Fault:
    """A kind of message.

    Args:
        name: in a few words.
        cause: of CAUSES.
        advice: what to do.
        excludes: jobs should do without the host.
    """

    name: str
    cause: str
    advice: str
    excludes: bool = False


def _xid(number: int, what: str, cause: str, advice: str, *, excludes: bool = False) -> tuple[int, Fault]:
    return number, Fault(f"Xid {number}: {what}", cause, advice, excludes)


_ENDED = "nothing by itself: it follows from another error, or from a process that was ended"

XIDS = dict(
    (
        _xid(8, "GPU stopped processing", "driver", RESET),
        _xid(13, "exception in a kernel", "program", PROGRAM),
        _xid(31, "kernel used an address that is not mapped", "program", PROGRAM),
        _xid(32, "broken stream of commands", "driver", RESET),
        _xid(38, "driver firmware error", "driver", RESET),
        _xid(43, "GPU stopped processing for a program", "program", PROGRAM),
        _xid(45, "program's channels were cleaned up", "consequence", _ENDED),
        _xid(46, "GPU stopped processing", "driver", RESET, excludes=True),
        _xid(48, "memory error of two bits (ECC)", "hardware", DRAIN, excludes=True),
        _xid(61, "internal micro-controller halted", "driver", RESET, excludes=True),
        _xid(62, "internal micro-controller halted", "hardware", RESET, excludes=True),
        _xid(
            63,
            "row of memory is taken out of use",
            "hardware",
            "nothing at once: reset the GPU when the job has ended",
        ),
        _xid(64, "row of memory could not be taken out of use", "hardware", DRAIN, excludes=True),
        _xid(68, "video engine exception", "driver", RESET),
        _xid(69, "exception in a graphics class", "program", PROGRAM),
        _xid(74, "NVLink error", "hardware", DRAIN, excludes=True),
        _xid(79, "GPU has fallen off the bus", "hardware", DRAIN, excludes=True),
        _xid(92, "many memory errors of one bit", "hardware", "watch it: the memory may be about to fail"),
        _xid(94, "memory error, held to one program (ECC)", "hardware", RESET, excludes=True),
        _xid(95, "memory error, held to no program (ECC)", "hardware", DRAIN, excludes=True),
        _xid(109, "switch between programs timed out", "driver", RESET),
        _xid(110, "security fault", "hardware", RESET, excludes=True),
        _xid(119, "GPU's system processor does not answer (GSP)", "driver", RESET, excludes=True),
        _xid(120, "GPU's system processor failed (GSP)", "driver", RESET, excludes=True),
        _xid(121, "link between chips corrected an error (C2C)", "hardware", "watch it"),
        _xid(122, "driver cannot read the GPU's flash memory", "hardware", RESET),
        _xid(136, "link training failed", "hardware", DRAIN, excludes=True),
        _xid(140, "memory error that was not recovered (ECC)", "hardware", DRAIN, excludes=True),
        _xid(143, "GPU could not be started", "hardware", DRAIN, excludes=True),
        *(_xid(number, "NVLink 5 error", "hardware", DRAIN, excludes=True) for number in range(144, 151)),
        _xid(154, "driver asks for a reset or a restart", "hardware", RESET, excludes=True),
    )
)


def xid(number: int) -> Fault:
    """What an Xid means; of those that are not in the table, that it is not."""
    return XIDS.get(number, Fault(f"Xid {number}", "driver", "look it up in NVIDIA's catalog of Xid errors"))


def _kind(
    pattern: str, name: str, cause: str, advice: str, *, excludes: bool = False
) -> tuple[re.Pattern[str], Fault]:
    return re.compile(pattern, re.IGNORECASE), Fault(name, cause, advice, excludes)


_MORE_MEMORY = "give the job more memory, or lower NUM_WORKERS or GPUS_PER_NODE"
_SHM = "enlarge /dev/shm (docker --shm-size), or set NUM_WORKERS=0"

# The first that matches a line counts.
PATTERNS = (
    _kind(
        r"uncorrectable ECC error|CUDA_ERROR_ECC_UNCORRECTABLE|cudaErrorECCUncorrectable",
        "uncorrectable memory error (ECC)",
        "hardware",
        DRAIN,
        excludes=True,
    ),
    _kind(
        r"uncorrectable NVLink error|cudaErrorNvlinkUncorrectable",
        "uncorrectable NVLink error",
        "hardware",
        DRAIN,
        excludes=True,
    ),
    _kind(r"fallen off the bus|GPU is lost", "GPU has fallen off the bus", "hardware", DRAIN, excludes=True),
    _kind(
        r"rm_init_adapter failed|RmInitAdapter failed",
        "GPU cannot be used",
        "driver",
        RESET,
        excludes=True,
    ),
    _kind(
        r"No CUDA GPUs are available|cudaErrorDevicesUnavailable|all CUDA-capable devices are busy",
        "GPU cannot be used",
        "driver",
        "see whether the job has asked for GPUs and nobody else holds them; of one host alone: the preflight,"
        " and " + RESET,
    ),
    _kind(
        r"hardware stack error|cudaErrorHardwareStackError",
        "hardware stack error",
        "hardware",
        DRAIN,
        excludes=True,
    ),
    # Each is three lines; healthy switches have Non-fatal ones by the dozen when they start.
    _kind(r"SXid .*: \d+, Fatal", "NVSwitch error (SXid)", "hardware", DRAIN, excludes=True),
    _kind(
        # "Machine check events logged" and "CPU 3: Machine Check: 0" are also said of errors that were
        # corrected.
        r"CPU \d+: Machine Check Exception|EDAC \S+ \d+ UE\b|Uncorrected (hardware )?(memory"
        r" )?error|\[Hardware Error\]: Uncorrected"
        r"|\[Hardware Error\]: event severity: (fatal|recoverable)",
        "uncorrectable error of processor or memory",
        "hardware",
        DRAIN,
        excludes=True,
    ),
    _kind(r"device-side assert", "assertion in a kernel", "program", PROGRAM),
    _kind(
        r"illegal memory access|misaligned address|illegal instruction was encountered|invalid program"
        r" counter",
        "kernel used an address that is not its own",
        "program",
        PROGRAM,
    ),
    _kind(
        r"unspecified launch failure|launch timed out and was terminated", "kernel failed", "program", PROGRAM
    ),
    _kind(
        r"(torch\.|^|\W)(cuda\.)?OutOfMemoryError|CUDA out of memory|CUDA error: out of memory",
        "GPU memory is full",
        "memory",
        "lower MBSZ, or raise RECOMPUTE, TP or EP; see `moe-exp plan`",
    ),
    _kind(
        r"oom[-_]kill|Out of memory: Killed process|out of memory: Killed|task \d+(-\d+)?: Out Of Memory"
        r"|tasks [\d,-]+: Out Of Memory",
        "the kernel killed a process: memory is full",
        "memory",
        _MORE_MEMORY,
    ),
    _kind(
        r"unable to (open|write|mmap|allocate|resize).*shared memory|insufficient shared memory"
        r"|Error while creating shared memory segment",
        "shared memory is full",
        "memory",
        _SHM,
    ),
    _kind(
        r"\bBus error\b|SIGBUS|Signal 7\b|exitcode\s*:\s*-7\b",
        "bus error, mostly /dev/shm being full",
        "memory",
        _SHM,
    ),
    _kind(r"No space left on device", "disk is full", "disk", "free some space"),
    _kind(
        r"Input/output error|Stale file handle|blk_update_request: I/O error|EXT4-fs error|XFS .*I/O error",
        "disk or file server fails",
        "disk",
        "look at the file system",
    ),
    _kind(
        r"Got async event : (port error|local catastrophic error|device fatal)|port_inactive"
        r"|mlx5_core .*(health compromised|fatal|assert)|infiniband.*(error|failed)",
        "network card lost its link",
        "network",
        NETWORK,
        excludes=True,
    ),
    _kind(
        r"mlx\d_core .*Link DOWN\b",
        "link of a network card was down",
        "network",
        "nothing, where it was while the node started; else " + NETWORK,
    ),
    _kind(
        r"Got completion from peer .* status=\d+|async fatal event on QP|ibv_\w+ failed|Call to ibv_\w+"
        r" failed",
        "InfiniBand transfer failed: one of the two ends, or the way between",
        "network",
        NETWORK,
    ),
    _kind(
        r"NET/OFI"
        r" .*(error|failed)|libfabric:.*<warn>.*(err:|error)"
        r"|efa_rdm\w*.*err|fi_addr_efa.*(Unreachable|Invalid)",
        "EFA transfer failed: one of the two ends, or the way between",
        "network",
        NETWORK,
    ),
    _kind(
        r"NCCL WARN .*(Connect(ion)? (to|refused)|socketProgress|Net ?: Connection closed|connection (timed"
        r" out|refused|closed))"
        r"|No route to host|Network is unreachable",
        "no connection to another host",
        "network",
        NETWORK,
    ),
    _kind(
        r"Watchdog caught collective operation timeout|ran for \d+ milliseconds before timing out|detected by"
        r" watchdog"
        r"|watchdog thread terminated|heartbeat monitor timed out",
        "NCCL waited too long for another rank",
        "consequence",
        "look for the rank that did not come: the first cause above, or `moe-exp watch stacks`",
    ),
    _kind(
        r"Connection (closed|reset) by peer|Broken pipe|Timed out waiting \d+ms"
        r"|remote process exited or there was a network error",
        "another rank has gone",
        "consequence",
        "look for the rank that went first",
    ),
    _kind(
        r"unhandled system error|unhandled cuda error|ncclSystemError|ncclInternalError|ncclRemoteError",
        "NCCL failed",
        "consequence",
        "look for the NCCL WARN line before it (NCCL_DEBUG=WARN)",
    ),
    _kind(
        r"CUDA error: |CUDA driver error|cudaError\w+|CUBLAS_STATUS_(EXECUTION_FAILED|INTERNAL_ERROR)"
        r"|CUDNN_STATUS_EXECUTION_FAILED",
        "CUDA error",
        "program",
        PROGRAM,
    ),
    _kind(r"moe-exp: rank \d+ on \S+( \(\S+\))? failed: ", "rank failed", "program", "read its traceback"),
    _kind(
        r"moe-exp: rank \d+ on .* has failed after iteration \d+: SIG(SEGV|ILL|FPE)",
        "rank crashed",
        "program",
        "read its log",
    ),
    _kind(
        r"moe-exp: rank \d+ on .* has failed after iteration \d+: SIG",
        "rank was ended by a signal",
        "consequence",
        "look for what came before: a hang, whose ranks all get SIGKILL, the kernel's oom_kill, NCCL's"
        " watchdog (SIGABRT)",
    ),
)

# Of Xids that say how bad it is: those with which jobs may go on.
_MILD = {
    **dict.fromkeys(range(144, 151), (r", \S+ Nonfatal ", "NVLink 5 error that is not fatal")),
    154: (r"to 0x0 \(None\)", "driver asks for nothing any more"),
}


def recognised(message: str) -> Fault | None:
    """The kind of a message, or None."""
    if found := re.search(r"NVRM: Xid \([^)]*\): (\d+)", message):
        number = int(found[1])
        pattern, what = _MILD.get(number, (r"(?!)", ""))
        return (
            Fault(f"Xid {number}: {what}", "hardware", "watch it")
            if re.search(pattern, message)
            else xid(number)
        )
    return next((fault for pattern, fault in PATTERNS if pattern.search(message)), None)
