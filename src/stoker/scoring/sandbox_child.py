"""Process of a sandboxed program: restricts itself, then runs the program from its standard input.

It imports the standard library only, and nothing of Stoker: it is run as a file.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import platform
import resource
import stat
import struct
import sys
import termios
from collections.abc import Iterable
from types import ModuleType

# Numbers of system calls (Linux: arch/x86/entry/syscalls/syscall_64.tbl, include/uapi/asm-generic/unistd.h), and the
# architecture's number in the filter (AUDIT_ARCH_*).
ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
# Refused: name, number on x86-64, number on ARM64.
REFUSED = """
socket 41 198, socketpair 53 199, connect 42 203, accept 43 202, bind 49 200, listen 50 201, sendto 44 206,
sendmsg 46 211, accept4 288 242, fork 57 -, vfork 58 -, execve 59 221, execveat 322 281, ptrace 101 117,
process_vm_readv 310 270, process_vm_writev 311 271, kill 62 129, tkill 200 130, tgkill 234 131,
rt_sigqueueinfo 129 138, rt_tgsigqueueinfo 297 240, pidfd_open 434 434, pidfd_send_signal 424 424,
pidfd_getfd 438 438, setns 308 268, unshare 272 97, mount 165 40, umount2 166 39, pivot_root 155 41, chroot 161 51,
bpf 321 280, io_uring_setup 425 425, io_uring_enter 426 426, io_uring_register 427 427, perf_event_open 298 241,
keyctl 250 219, add_key 248 217, request_key 249 218, userfaultfd 323 282, init_module 175 105,
finit_module 313 273, delete_module 176 106, kexec_load 246 104, reboot 169 142, swapon 167 224, swapoff 168 225,
settimeofday 164 170, clock_settime 227 112, creat 85 -, openat2 437 437, truncate 76 45, rename 82 -,
renameat 264 38, renameat2 316 276, link 86 -, linkat 265 37, symlink 88 -, symlinkat 266 36, unlink 87 -,
unlinkat 263 35, mkdir 83 -, mkdirat 258 34, rmdir 84 -, mknod 133 -, mknodat 259 33, chmod 90 -, fchmod 91 52,
fchmodat 268 53, fchmodat2 452 452, chown 92 -, fchown 93 55, lchown 94 -, fchownat 260 54, setxattr 188 5,
lsetxattr 189 6, fsetxattr 190 7, removexattr 197 14, lremovexattr 198 15, fremovexattr 199 16, utime 132 -,
utimes 235 -, utimensat 280 88, futimesat 261 -, open_tree 428 428, move_mount 429 429, fsopen 430 430,
fsmount 432 432, name_to_handle_at 303 264, open_by_handle_at 304 265, memfd_create 319 279, setpriority 141 140,
prlimit64 302 261, shmget 29 194, shmat 30 196, shmctl 31 195, msgget 68 186, msgsnd 69 189, msgrcv 70 188,
msgctl 71 187, semget 64 190, semop 65 193, semtimedop 220 192, semctl 66 191, mq_open 240 180, mq_unlink 241 181,
sched_setparam 142 118, sched_setscheduler 144 119, sched_setaffinity 203 122, sched_setattr 314 274, ioprio_set 251 30,
move_pages 279 239, migrate_pages 256 238, kcmp 312 272, process_madvise 440 440, process_mrelease 448 448, flock 73 32,
fanotify_init 300 262, fsconfig 431 431, fspick 433 433, mount_setattr 442 442, inotify_init 253 -,
inotify_init1 294 26, memfd_secret 447 447, clone 56 220, clone3 435 435, sethostname 170 161, setdomainname 171 162,
adjtimex 159 171, clock_adjtime 305 266, acct 163 89, iopl 172 -, ioperm 173 -, kexec_file_load 320 294,
quotactl 179 60, quotactl_fd 443 443, vhangup 153 58, syslog 103 116, sync 162 81, syncfs 306 267
"""
# Refused partly: see `filter_of`.
LIMITED = "open 2 -, openat 257 56, fcntl 72 25, ioctl 16 29"
# First number of the calls newer than this list, on both architectures (setxattrat, Linux 6.13). Those of x86's x32
# interface are larger.
UNKNOWN = 463
# What `fcntl` and `ioctl` may do. Other commands send signals to any process (F_SETOWN, F_SETSIG, FIOSETOWN), lock
# files, or change a terminal.
COMMANDS = {
    "fcntl": (fcntl.F_DUPFD, fcntl.F_DUPFD_CLOEXEC, fcntl.F_GETFD, fcntl.F_SETFD, fcntl.F_GETFL, fcntl.F_SETFL),
    "ioctl": (
        *(termios.TCGETS, termios.TIOCGWINSZ, termios.FIONREAD, termios.FIONBIO),
        *(termios.FIOCLEX, termios.FIONCLEX),
    ),
}

_ROWS = [entry.split() for entry in REFUSED.replace("\n", " ").split(",")]
NAMES = tuple(name for name, _, _ in _ROWS)
_ALL = _ROWS + [entry.split() for entry in LIMITED.split(", ")]
SYSCALLS = {
    "x86_64": {name: number for name, number, _ in _ALL},
    "aarch64": {name: number for name, _, number in _ALL},
}

# BPF instructions of the filter (include/uapi/linux/filter.h, seccomp.h).
LOAD, EQUAL, AT_LEAST, ANY_BIT, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
ALLOW, KILL, REFUSE = 0x7FFF0000, 0x80000000, 0x00050000
NUMBER, ARCHITECTURE, FIRST_ARGUMENT = 0, 4, 16  # offsets in the filter's input
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND

SIGN = 32  # bytes of the secret that begins standard input; the outcome counts only behind it
PASSED, FAILED = b" passed", b" failed"

NO_NEW_PRIVILEGES, SET_SECCOMP, SET_DEATH_SIGNAL, FILTER = 38, 22, 1, 2
SIGKILL = 9

# Landlock (include/uapi/linux/landlock.h): system calls, which have the same numbers on both architectures.
CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444, 445, 446
GET_VERSION, BELOW_PATH = 1, 1
RIGHTS = {1: 13, 2: 14, 3: 15, 4: 15, 5: 16}  # number of rights over files, by version; newer versions have those of 5
READ_FILE, READ_FOLDER = 1 << 2, 1 << 3
# What may be read: the standard library, shared libraries, time zones, two devices, and the working folder.
READABLE = (
    *("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/etc/ld.so.cache", "/usr/share/zoneinfo"),
    *("/dev/null", "/dev/urandom", "."),
)
CAPABILITIES = struct.pack("Ii", 0x20080522, 0)  # _LINUX_CAPABILITY_VERSION_3, of this process


def instruction(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    """Encodes one instruction of a filter."""
    return struct.pack("HBBI", code, if_true, if_false, value)


def filter_of(machine: str) -> bytes:
    """Returns the filter program that the kernel runs before each system call."""
    numbers = {name: int(number) for name, number in SYSCALLS[machine].items() if number != "-"}
    refuse = instruction(RETURN, REFUSE | errno.EPERM)
    program = [
        instruction(LOAD, ARCHITECTURE),
        instruction(EQUAL, ARCHITECTURES[machine], 1, 0),
        instruction(RETURN, KILL),
        instruction(LOAD, NUMBER),
    ]
    program += [instruction(AT_LEAST, UNKNOWN, 0, 1), instruction(RETURN, REFUSE | errno.ENOSYS)]
    for name in NAMES:
        if name in numbers:
            program += [instruction(EQUAL, numbers[name], 0, 1), refuse]
    for name, argument in (("open", 1), ("openat", 2)):
        if name in numbers:
            program += [
                instruction(EQUAL, numbers[name], 0, 4),
                instruction(LOAD, FIRST_ARGUMENT + 8 * argument),
                instruction(ANY_BIT, WRITES, 0, 1),
                refuse,
                instruction(LOAD, NUMBER),
            ]
    program += [  # O_ASYNC of a terminal signals the processes that use it
        instruction(EQUAL, numbers["fcntl"], 0, 6),
        instruction(LOAD, FIRST_ARGUMENT + 8),
        instruction(EQUAL, fcntl.F_SETFL, 0, 3),
        instruction(LOAD, FIRST_ARGUMENT + 16),
        instruction(ANY_BIT, os.O_ASYNC, 0, 1),
        refuse,
        instruction(LOAD, NUMBER),
    ]
    for name, commands in COMMANDS.items():
        checks = [instruction(LOAD, FIRST_ARGUMENT + 8)]
        for command in commands:
            checks += [instruction(EQUAL, command, 0, 1), instruction(RETURN, ALLOW)]
        program += [instruction(EQUAL, numbers[name], 0, len(checks) + 1), *checks, refuse]
    return b"".join([*program, instruction(RETURN, ALLOW)])


def confine() -> None:
    """Restricts this process, irrevocably: the files that it can read, its capabilities, and its system calls."""
    library = ctypes.CDLL(None, use_errno=True)
    program = filter_of(platform.machine())
    held = ctypes.create_string_buffer(program, len(program))

    class Program(ctypes.Structure):
        _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_void_p))

    given = Program(len(program) // 8, ctypes.addressof(held))
    _require(library.prctl(SET_DEATH_SIGNAL, SIGKILL, 0, 0, 0))
    _require(library.prctl(NO_NEW_PRIVILEGES, 1, 0, 0, 0))
    restrict_reading(library, (*READABLE, *sys.path, f"{sys.base_prefix}/lib"))
    _require(library.capset(CAPABILITIES, bytes(24)))
    _require(library.prctl(SET_SECCOMP, FILTER, ctypes.byref(given), 0, 0))


def restrict_reading(library: ctypes.CDLL, paths: Iterable[str]) -> None:
    """Has the kernel refuse every file that is not one of some paths or below one; nothing where it has no Landlock."""
    version = library.syscall(CREATE_RULESET, None, ctypes.c_long(0), GET_VERSION)
    if version < 1:
        return
    handled = struct.pack("Q", (1 << RIGHTS.get(version, RIGHTS[max(RIGHTS)])) - 1)
    rules = _require(library.syscall(CREATE_RULESET, handled, ctypes.c_long(len(handled)), 0))
    for path in paths:
        try:
            place = os.open(path, os.O_PATH | os.O_CLOEXEC)
        except OSError:
            continue
        right = READ_FILE | (READ_FOLDER if stat.S_ISDIR(os.fstat(place).st_mode) else 0)
        _require(library.syscall(ADD_RULE, rules, BELOW_PATH, struct.pack("=Qi", right, place), 0))
        os.close(place)
    _require(library.syscall(RESTRICT_SELF, rules, 0))
    os.close(rules)


def _require(result: int) -> int:
    if result < 0:
        raise OSError(ctypes.get_errno(), "the system gives no sandbox")
    return result


def run(seconds: int, memory: int, size: int) -> bytes:
    """Runs the program from standard input within limits; returns the outcome, `PASSED` or `FAILED`.

    The name of the exception that ended it is written to standard output. It is the program's word, so it decides
    nothing: code of the program may run while it is read.
    """
    source = b"".join(iter(lambda: os.read(0, 1 << 16), b""))
    said = os.dup(1)
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 0)
    os.dup2(nothing, 1)
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
    confine()
    sys.argv = sys.orig_argv = ["program"]
    module = sys.modules["__main__"] = ModuleType("__main__")
    try:
        exec(compile(source, "program", "exec", dont_inherit=True), module.__dict__)
    except BaseException as error:
        os.write(said, type(error).__name__.encode())
        return FAILED
    return PASSED


def main() -> None:
    """Runs the program; writes the sign and the outcome, unless the program ends the process itself."""
    limits = [int(argument) for argument in sys.argv[1:]]
    # While the program runs, only the evaluation stack holds the sign: neither a variable of a frame nor an object that
    # the garbage collector lists.
    os.write(os.dup(1), b"\n" + os.read(0, SIGN) + run(*limits))
    os._exit(0)


if __name__ == "__main__":
    main()
