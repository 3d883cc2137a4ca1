"""Error messages of drivers, CUDA, NCCL, NICs, the kernel, SLURM, file systems and Python, with their causes.

Xid numbers are from NVIDIA's catalog (docs.nvidia.com/deploy/xid-errors, for Ampere and newer, read in 2026).
An Xid alone does not prove a cause: every Xid can come from a broken GPU, but also from a program that writes
to invalid addresses.
"""

import re
from dataclasses import dataclass
from typing import Any

# In display order: a cause may lead to those after it.
CAUSES = (
    "hardware", "driver", "network", "memory", "storage", "quota", "service", "data", "settings", "program",
    "kernel", "limit", "crash", "consequence",
)  # fmt: skip

DRAIN = "take the node out of service and have it inspected"
RESET = "reset the GPU or reboot the node; take the node out of service if the error recurs"
NETWORK = "check link, cable and switch of the node; take the node out of service if the error recurs"
PROGRAM = "check the program (CUDA_LAUNCH_BLOCKING=1 shows the line); if only one GPU fails, suspect that GPU"


@dataclass(frozen=True)
class Fault:
    """A known kind of error. `cause` is one of CAUSES. If `excludes` is set, jobs should avoid the host."""

    name: str
    cause: str
    advice: str
    excludes: bool = False


_ENDED = "none: caused by another error or a terminated process"
# By Xid number: description, cause, advice, and True if jobs should avoid the host
_XIDS: dict[int, tuple[Any, ...]] = {
    8: ("GPU stopped processing", "driver", RESET),
    13: ("exception in a kernel", "kernel", PROGRAM),
    31: ("kernel accessed an unmapped address", "kernel", PROGRAM),
    32: ("corrupted command stream", "driver", RESET),
    38: ("driver firmware error", "driver", RESET),
    43: ("GPU stopped processing a program", "kernel", PROGRAM),
    45: ("program's channels were cleaned up", "consequence", _ENDED),
    46: ("GPU stopped processing", "driver", RESET, True),
    48: ("double-bit memory error (ECC)", "hardware", DRAIN, True),
    61: ("internal micro-controller halted", "driver", RESET, True),
    62: ("internal micro-controller halted", "hardware", RESET, True),
    63: ("memory row was retired or remapped", "hardware", "reset the GPU after the job has ended"),
    64: ("memory row could not be retired or remapped", "hardware", DRAIN, True),
    68: ("video engine exception", "driver", RESET),
    69: ("exception in a graphics class", "program", PROGRAM),
    74: ("NVLink error", "hardware", DRAIN, True),
    79: ("GPU has fallen off the bus", "hardware", DRAIN, True),
    92: ("many single-bit memory errors", "hardware", "monitor the GPU: its memory may be about to fail"),
    94: ("memory error contained to one program (ECC)", "hardware", RESET, True),
    95: ("uncontained memory error (ECC)", "hardware", DRAIN, True),
    109: ("context switch timed out", "driver", RESET),
    110: ("security fault", "hardware", RESET, True),
    119: ("GPU system processor does not respond (GSP)", "driver", RESET, True),
    120: ("GPU system processor failed (GSP)", "driver", RESET, True),
    121: ("corrected error on the link between chips (C2C)", "hardware", "monitor the GPU"),
    122: ("driver cannot read the GPU's flash memory", "hardware", RESET),
    136: ("link training failed", "hardware", DRAIN, True),
    140: ("unrecovered memory error (ECC)", "hardware", DRAIN, True),
    143: ("GPU initialization failed", "hardware", DRAIN, True),
    154: ("driver requests a reset or a reboot", "hardware", RESET, True),
    **dict.fromkeys(range(144, 151), ("NVLink 5 error", "hardware", DRAIN, True)),
}
XIDS = {number: Fault(f"Xid {number}: {what}", *rest) for number, (what, *rest) in _XIDS.items()}


_MORE_MEMORY = "request more memory for the job, or lower NUM_WORKERS or GPUS_PER_NODE"
_SERVICE = "none if the service is back"
_TRACEBACK = "read its traceback"
_SHM = "enlarge /dev/shm (docker --shm-size), or set NUM_WORKERS=0"
_NO_GPU = (
    "check that the job requested GPUs and no other process uses them; if only one host is affected, run"
    f" the preflight, or {RESET}"
)
_SIGNALLED = "find the earlier cause: a hang (SIGKILL to all ranks), the kernel's oom_kill, NCCL (SIGABRT)"

# What stands before an exception at the end of a traceback: ranks, task numbers, times.
_BEFORE = r"^(\S*\[?rank ?\d+\]?:\s*|\d+: |\[[^\]]*\]:?\s*|\S+: (?=\[rank))*"

# Name, cause, advice and `excludes` of each fault, and its pattern. The first match counts, so specific
# patterns come before general ones.
_MESSAGES: tuple[tuple[Any, ...], ...] = (
    ("uncorrectable memory error (ECC)", "hardware", DRAIN, True,
     r"uncorrectable ECC error|CUDA_ERROR_ECC_UNCORRECTABLE|cudaErrorECCUncorrectable|(GPU"
     r"|amdgpu).*uncorrectable (hardware )?errors? (detected|count: [1-9])"),
    ("uncorrectable NVLink error", "hardware", DRAIN, True,
     r"uncorrectable NVLink error|cudaErrorNvlinkUncorrectable"),
    ("GPU has fallen off the bus", "hardware", DRAIN, True,
     r"fallen off the bus|GPU is lost|GPU-\S+ .*disconnected|PCI reads still not working"),
    ("GPU is unusable", "driver", RESET, True,
     r"rm_init_adapter failed|RmInitAdapter failed|Unable to determine the device handle"
     r"|GPU requires reset|couldn't communicate with the NVIDIA driver|HW (Thermal|Power Brake) Slowdown"
     r"|thermal shutdown|amdgpu.*(GPU reset|ring \w+ timeout)|HW Exception by GPU node"),
    ("NVLink fabric is not ready", "hardware", RESET, True,
     r"system not yet initialized|SYSTEM_NOT_READY|Fabric ?Manager.*(fail|error|not running|inactive)"
     r"|Failed to bind NVLink|Fabric State.*(Failure|In Progress)|transport/nvls.*(error|fail)"),
    ("GPU is unusable", "driver", _NO_GPU, False,
     r"No CUDA GPUs are available|cudaErrorDevicesUnavailable|all CUDA-capable devices are busy"
     r"|CUDA driver initialization failed|Failed to initialize NVML|No devices were found"
     r"|nvidia-container-cli: initialization error|driver not loaded|no CUDA-capable device is detected"
     r"|CUDA unknown error"),
    ("hardware stack error", "hardware", DRAIN, True, r"hardware stack error|cudaErrorHardwareStackError"),
    # Each error has three lines; healthy switches print dozens of Non-fatal ones at start-up.
    ("NVSwitch error (SXid)", "hardware", DRAIN, True, r"SXid .*: \d+, Fatal"),
    # "Machine check events logged" and "CPU 3: Machine Check: 0" also appear for corrected errors.
    ("uncorrectable CPU or memory error", "hardware", DRAIN, True,
     r"CPU \d+: Machine Check Exception|EDAC \S+ \d+ UE\b|Uncorrected (hardware )?(memory )?error"
     r"|\[Hardware Error\]: Uncorrected|\[Hardware Error\]: event severity: (fatal|recoverable)"),
    ("node failed", "hardware", DRAIN, True,
     r"DUE TO NODE FAILURE|\bNODE_FAIL\b|Node failure on|error: Nodes? \S+ (is |are )?(not responding"
     r"|DOWN)|Kill task failed|JOB NOT ENDING WITH SIGNALS|Kernel panic|BUG: soft lockup|hard LOCKUP"
     r"|node was expelled|Node (is )?unreachable|drained by|set to DRAIN"),
    ("node refuses jobs", "hardware", DRAIN, True,
     r"Munge decode failed|Invalid job credential|Protocol authentication error|prolog.*(failed|error"
     r"|exit)|Couldn't find the specified plugin"),
    ("device computes wrong results", "hardware", DRAIN, True,
     r"different results for the same computation|Possible (transient|persistent) error: unexpected"
     r"|silent data corruption"),
    ("clock is wrong", "hardware", "synchronize the clock (chrony, ntp)", True,
     r"RequestTimeTooSkewed|clock skew|credential.*(expired|rewound)|Rewound credential"
     r"|Expired credential"),
    ("local disk failed", "hardware", DRAIN, True,
     r"nvme\S*: (I/O .*timeout|.*(controller is down|Disabling|Removing after probe failure))"
     r"|I/O error,? .*dev (nvme|sd)|Buffer I/O error on dev|critical (medium|target) error"
     r"|EXT4-fs error \(device (nvme|sd|dm|md)|XFS \((nvme|sd|dm|md)\S*: .*(I/O error|shut(ting)? ?down)"),
    ("network card failed", "network", NETWORK, True,
     r"Got async event : (port error|local catastrophic error|device fatal)|port_inactive"
     r"|mlx5_core .*(health compromised|fatal|assert|health recovery failed)|infiniband.*(error|failed)"),
    ("token number outside of the vocabulary", "data", "check tokenizer and VOCAB_SIZE of the data", False,
     r"srcIndex < srcSelectDimSize|index out of range in self|Assertion `t >= 0 && t < n_classes"
     r"|token.*(>=|exceeds|larger than|outside).*vocab"),
    ("assertion failed in a kernel", "program", PROGRAM, False, r"device-side assert"),
    ("kernel accessed an invalid address", "kernel", PROGRAM, False,
     r"illegal memory access|misaligned address|illegal instruction was encountered"
     r"|invalid program counter"),
    ("kernel failed", "kernel", PROGRAM, False,
     r"unspecified launch failure|launch timed out and was terminated"),
    ("memory cannot be locked", "settings", "raise the limit of locked memory (ulimit -l)", False,
     r"ibv_reg_mr\S* failed|RLIMIT_MEMLOCK"),
    ("limit of the process is reached", "limit", "raise the job's limits (ulimit -n, -u)", False,
     r"Too many open files|items of ancdata|pthread_create failed|can't start new thread|(fork|clone"
     r"|thread)\b.*Resource temporarily unavailable"),
    ("GPU memory is full", "memory", "lower MBSZ, or raise RECOMPUTE, TP or EP; see `moe-exp plan`", False,
     r"(torch\.|^|\W)(cuda\.)?OutOfMemoryError|CUDA out of memory|CUDA error: out of memory"
     r"|HIP out of memory|CUBLAS_STATUS_ALLOC_FAILED|Failed to CUDA calloc"),
    ("out of memory: the operating system killed a process", "memory", _MORE_MEMORY, False,
     r"oom[-_]kill|Out of memory: Killed process|out of memory: Killed|task \d+(-\d+)?: Out Of Memory"
     r"|tasks [\d,-]+: Out Of Memory|\bOOMKilled\b|Exceeded job memory limit"
     r"|DefaultCPUAllocator: can't allocate|Cannot allocate memory|\bMemoryError\b|OUT_OF_MEMORY"),
    ("shared memory is full", "limit", _SHM, False,
     r"unable to (open|write|mmap|allocate|resize).*shared memory|insufficient shared memory"
     r"|Error while creating shared memory segment|posix_fallocate failed|No space left.*/dev/shm"
     r"|/dev/shm.*No space left|unable to write to file </torch_"),
    ("bus error (usually /dev/shm is full)", "limit", _SHM, False,
     r"\bBus error\b|SIGBUS|Signal 7\b|exitcode\s*:\s*-7\b"),
    ("debug information could not be written", "consequence", "none", False, r"FlightRecorder|debug info"),
    ("a service does not respond", "service", _SERVICE, False,
     r"host='huggingface\.co'.*(Max retries|timed out)|HfHubHTTPError: 5\d\d|\b5\d\d .*huggingface\.co"
     r"|huggingface\S* .*timed out|wandb.*(CommError|timed out|5\d\d)"),
    ("a service limits requests", "quota", _SERVICE, False, r"\b429\b.*(Error|Too Many)|Too Many Requests"),
    ("disk is full", "storage", "free some space", False,
     r"No space left on device|quota exceeded|\[Errno (28|122)\]|ENOSPC|EDQUOT"),
    ("file server does not respond", "storage", "check the file system", False,
     r"Input/output error|Stale (NFS )?file handle|blk_update_request: I/O error|EXT4-fs error"
     r"|XFS .*I/O error|Transport endpoint|transport endpoint shutdown|Read-only file system|\[Errno (5"
     r"|30|107|108|116|121)\]|server \S+ not responding|was evicted by|ceph: .*(hung|denied|evicted)"
     r"|LustreError.*(evicted|failed: rc)|mount\.nfs: Connection timed out|MountVolume.*timed out"
     r"|PytorchStreamWriter failed|failed writing|unexpected pos \d+ vs|\[Errno (70|110|112)\].*'/"
     r"|remote I/O error|(rpc_wait|nfs4?_|ptlrpc|cl_sync_io|ll_file|ceph_|gpfs|fuse_)\w*\+0x"
     r"|beegfs.*(failed|timed out|unreachable)|Host is down|Communication error on send"
     r"|Unable to contact slurm controller|code: (5|28|70|107|108|116|122),"),
    ("object store is unavailable", "storage", _SERVICE, False,
     r"\bSlowDown\b|reduce your request rate|ServiceUnavailable|InternalError\).*(PutObject|GetObject"
     r"|UploadPart)|\b50[0234]\b.*(Server Error|Service Unavailable|Bad Gateway|Gateway)"
     r"|Service Unavailable|EndpointConnectionError|ConnectTimeoutError|(Read|Connect) ?timeout.*(s3"
     r"|storage|blob)|(s3|storage|blob)\S*.*read timed out|RequestTimeout|ServerBusy|UNAVAILABLE.*(gs"
     r"|s3)://|rateLimitExceeded|botocore\.\S*(ConnectionClosed|Timeout)Error"
     r"|google\.api_core\.\S*(RetryError|ServiceUnavailable|5\d\d)"),
    ("access was denied", "settings", "renew the credentials", False,
     r"AccessDenied|InvalidAccessKeyId|SignatureDoesNotMatch|ExpiredToken|Unauthorized"
     r"|\b40[13]\b.*(Client|Forbidden)|403 Forbidden|NoCredentialsError|GatedRepo|gated repo"
     r"|RepositoryNotFound|NoSuchBucket|NoSuchKey|CERTIFICATE_VERIFY_FAILED|API key|AuthenticationError"
     r"|failed to authenticate|InvalidToken|could not read Username"),
    ("damaged file", "data", "replace the damaged file, or read an older checkpoint", False,
     r"PytorchStreamReader failed|failed finding central directory|SafetensorError"
     r"|MetadataIncompleteBuffer|HeaderTooLarge|InvalidHeader|UnpicklingError|unpickling|Ran out of input"
     r"|BadZipFile|JSONDecodeError|UnicodeDecodeError|ArrowInvalid|Parquet|zlib\.error|BadGzipFile"
     r"|Compressed file ended|LZMAError|unexpected EOF|unexpected end of data|checksum"
     r"|corrupt(?!ed/incomplete)|truncated|no greater than buffer length|magic number"
     r"|mmap length is greater|cannot mmap an empty file|buffer size must be a multiple"
     r"|Unable to open file|StopIteration|ran out of (data|samples)|not enough (samples|documents|data)"
     r"|dataset is empty|num_samples should be a positive|invalid (header|magic|record|utf)|bad (magic"
     r"|marshal)|Error tokenizing data"),
    ("checkpoint does not fit the model", "settings", "check model settings and checkpoint", False,
     r"Missing key|Unexpected key|size mismatch for|loading state_dict|CheckpointingException"
     r"|CheckpointException|shape mismatch|Shapes? .* (mismatch|do not match)|exit-on-missing-checkpoint"
     r"|could not (find|load) the (checkpoint|metadata)|WeightsUnpickler|weights_only"
     r"|doesn't match the size of optimizer|loaded state dict|no checkpoint (found|in)"
     r"|is not a checkpoint|checkpoint .*(was|saved) .*(with|by) .*(parallel|world|ranks)"),
    # ranks that compile the same kernel at the same time
    ("file of a shared cache disappeared", "consequence", "give each node a cache of its own", False,
     r"(No such file|FileNotFound|not empty|File exists|resource busy).*(triton|inductor|torch_extensions"
     r"|\.cache/)|(torch_extensions|triton|inductor|\.cache/)\S* ?.*(cannot open shared|No such file"
     r"|not empty|File exists)"),
    ("port is taken", "crash", "choose another MASTER_PORT", False, r"EADDRINUSE|address already in use"),
    ("installed versions do not fit", "settings", "install versions that fit each other", False,
     r"ModuleNotFoundError|ImportError|undefined symbol|cannot open shared object"
     r"|GLIBC\w*_[\d.]+' not found|no kernel image is available|driver version is insufficient"
     r"|not compatible with the current PyTorch|plugin.*(mismatch|version)|unsupported (GPU|gpu|compute)"
     r"|requires? (compute capability|sm_|Ampere)|Function not implemented|does not support|ptxas fatal"
     r"|nvcc fatal|CUDA_HOME|VersionConflict|DistributionNotFound|binary incompatibility"
     r"|size changed, may indicate|numpy.* failed to import|Illegal instruction"
     r"|forward compatibility was attempted|version mismatch|incompatible with|is too old"),
    ("file is missing or unreadable", "settings", "check path and permissions", False,
     r"FileNotFoundError|No such file or directory|PermissionError|Permission denied|NotADirectoryError"
     r"|IsADirectoryError|does not exist|couldn't find|not a directory"),
    ("setting was refused", "settings", "correct the setting", False,
     r"unrecognized arguments|error: (argument|the following arguments)|invalid choice|(must"
     r"|should) be (divisible|a multiple)|not divisible|is not a multiple|Invalid generic resource"
     r"|Requested node configuration|ErrImagePull|ImagePullBackOff|invalid partition"
     r"|Unable to allocate resources|error: .*pyxis|spank: required plugin|Duplicate GPU detected"
     r"|invalid device ordinal|total limit of containers|exceeded its.*limit|\S+\.py: error: "
     r"|ncclInvalid(Usage|Argument)|no socket interface found|world[_ ]?size .*(not|must|but|less"
     r"|greater)|not a valid model identifier|Repo id must|Can't load (the )?(tokenizer|config)"
     r"|trust_remote_code|LocalEntryNotFound|OfflineModeIsEnabled|sbatch: error|Unable to create step"
     r"|Unable to confirm allocation|Memory required by task|More processors requested"
     r"|Batch job submission failed|command not found|bad interpreter|Exec format error|unbound variable"
     r"|execve\(\)|CreateContainerConfigError|InvalidImageName|FailedScheduling|exceeded quota"
     r"|Error response from daemon|failed to create (shim )?task|nvidia-container-cli: requirement"
     r"|OCI runtime|could not select device|error: enroot|is required but|unknown (option|argument|key"
     r"|field)|unexpected keyword|not supported"),
    ("operands do not fit", "program", _TRACEBACK, False,
     r"size of tensor|sizes of tensors must|must match the (size|existing)|cannot be multiplied"
     r"|not implemented for|Expected (all tensors|object|input|scalar|tensor|to)\b|expected scalar type"
     r"|invalid for input of size|does not require grad|inplace operation|through the graph a second time"
     r"|unused parameters"),
    ("ranks run different collectives", "program", "check the program's branches on all ranks", False,
     r"collective mismatch|mismatch between collectives|collectives.*do not match"),
    ("code could not be compiled", "settings", "install the compiler and headers named in the message", False,
     r"failed to compile|make: \*\*\* |error: command .* failed|ninja: build stopped|OutOfResources"
     r"|Error building extension|CompilationError"),
    ("loss is not finite", "program", "lower LR or look for bad samples", False,
     r"loss scale already at minimum|loss is (NaN|nan|inf)|(NaN|nan|Inf|inf) (in|loss|detected|found)"
     r"|found NaN|non-finite|Unexpected result (nan|inf)|grad(ient)? norm is (nan|NaN|inf)|diverged"
     r"|loss became"),
    ("network card's link was down", "network", "none if the node was booting; otherwise " + NETWORK, False,
     r"mlx\d_core .*Link DOWN\b"),
    ("InfiniBand transfer failed at either end or in between", "network", NETWORK, False,
     r"Got completion from peer .* status=\d+|async fatal event on QP|ibv_\w+ failed"
     r"|Call to ibv_\w+ failed"),
    ("EFA transfer failed at either end or in between", "network", NETWORK, False,
     r"NET/OFI .*(error|failed)|libfabric:.*<warn>.*(err:|error)|efa_rdm\w*.*err"
     r"|fi_addr_efa.*(Unreachable|Invalid)"),
    ("no connection to another host", "network", NETWORK, False,
     r"NCCL WARN .*(Connect(ion)? (to|refused)|socketProgress|Net ?: Connection closed"
     r"|connection (timed out|refused|closed))|No route to host|Network is unreachable"),
    ("name of a host is unknown", "consequence", "check MASTER_ADDR if it persists", False,
     r"(Temporary failure in|Could not resolve|unable to resolve).*(name|host)|Name or service not known"),
    ("NCCL timed out waiting for another rank", "consequence",
     "find the rank that NCCL waited for: see the first cause above or `moe-exp watch stacks`", False,
     r"Watchdog caught collective operation timeout|ran for \d+ milliseconds before timing out"
     r"|detected by watchdog|watchdog thread terminated|heartbeat monitor timed out"
     r"|Timed out (initializing|after)|store.based barrier"),
    ("NCCL failed", "consequence", "find the preceding NCCL WARN line (NCCL_DEBUG=WARN)", False,
     r"unhandled system error|unhandled cuda error|ncclSystemError|ncclInternalError|ncclRemoteError"),
    ("another rank disconnected", "consequence", "find the rank that failed first", False,
     r"Connection (closed|reset) by peer|Broken pipe|Timed out waiting \d+ms"
     r"|remote process exited or there was a network error|\b(Dist(Network|Store|Backend)|ChildFailed"
     r"|Connection|BrokenPipe|ConnectionReset|Timeout|Rendezvous\w*|CalledProcess)Error\b|SignalException"),
    ("a service does not respond", "service", _SERVICE, False,
     r"HTTPError|MaxRetryError|ReadTimeout|ConnectTimeout|RemoteDisconnected|\bCommError\b|URLError"),
    ("CUDA error", "kernel", PROGRAM, False,
     r"CUDA error: |CUDA driver error|cudaError\w+|CUBLAS_STATUS_(EXECUTION_FAILED|INTERNAL_ERROR)"
     r"|CUDNN_STATUS_EXECUTION_FAILED"),
    ("rank crashed", "crash", "read its log", False,
     r"\bSIG(SEGV|ILL|FPE)\b|Segmentation fault|Signal 11\b|exitcode\s*: -11"
     r"|DataLoader worker .* (is killed|exited unexpectedly)|core dumped"),
    ("rank was terminated by a signal", "consequence", _SIGNALLED, False,
     r"moe-exp: rank \d+ on .* has failed after iteration \d+: SIG|DUE TO (TIME LIMIT|PREEMPTION)"
     r"|\bpreempt|SIGTERM|SIGKILL|exit ?code ?:? ?(-9|-15|137|143)\b"),
    ("exception", "program", _TRACEBACK, False,
     r"\b(Key|Type|Value|Attribute|Name|Index|Assertion|NotImplemented|UnboundLocal|Syntax|ZeroDivision"
     r"|Indentation|Recursion|Validation|Schema|Config\w*)Error\b(:|$)"),
    ("exception of an unknown kind", "crash", _TRACEBACK, False,
     r"moe-exp: rank \d+ on \S+( \(\S+\))? (has )?failed: [A-Z]\w*"
     r"|" + _BEFORE + r"([A-Za-z_]\w*\.)*([A-Z]\w*(Error|Exception)|UnsupportedOperation)(: |$)"),
)  # fmt: skip
PATTERNS = [(re.compile(pattern, re.IGNORECASE), Fault(*fault)) for *fault, pattern in _MESSAGES]

# These Xids state their severity; jobs may survive the ones that match.
_MILD = {
    **dict.fromkeys(range(144, 151), (r", \S+ Nonfatal ", "nonfatal NVLink 5 error")),
    154: (r"to 0x0 \(None\)", "driver no longer requests an action"),
}


# Messages that take a fault back, by its name.
RECOVERIES = {
    "file server does not respond": re.compile(r"server \S+ OK\b|Connection restored|reconnect success"),
    "network card failed": re.compile(r"port_active|Port: \d+ Link (UP|ACTIVE)|event : port active"),
    "network card's link was down": re.compile(r"Port: \d+ Link (UP|ACTIVE)"),
}
# A program that tries again has not failed.
_RETRIED = re.compile(r"\b(WARN(ING)?|INFO|DEBUG)\b.*([Rr]etry|[Rr]etries|attempt \d)")


def recognised(message: str) -> Fault | None:
    """Fault reported by a log line; None if the line matches no known fault."""
    if _RETRIED.search(message):
        return None
    if found := re.search(r"NVRM: Xid \([^)]*\): (\d+)", message):
        number = int(found[1])
        pattern, what = _MILD.get(number, (r"(?!)", ""))
        if re.search(pattern, message):
            return Fault(f"Xid {number}: {what}", "hardware", "monitor the GPU")
        return XIDS.get(number, Fault(f"Xid {number}", "driver", "look it up in NVIDIA's Xid error catalog"))
    return next((fault for pattern, fault in PATTERNS if pattern.search(message)), None)
