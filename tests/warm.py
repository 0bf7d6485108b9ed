"""A Python that has torch imported already: `python warm.py MODULES ARGUMENT...` does what `python ARGUMENT...` does.

It does so in a fork of a process that has imported MODULES, such as torch or torch,transformers, and nothing else. An
import of torch takes as long as most of what tests let other processes do, and there are more than a hundred of them.
Tests of what happens before an import, of options of Python or of signals start a Python of their own.

`start` starts the process that forks, for all workers of a run. Without it, and without forks, Python just begins.
"""

import contextlib
import gc
import importlib.util
import json
import os
import runpy
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import types
import warnings

VARIABLE = "TESTS_WARM"  # the folder of the sockets
CODES = ("-c", "-m")


def python(*modules):
    """The first words of a command: Python, or what goes on as one does that has imported these modules."""
    return [sys.executable, *(["-I", "-S", __file__, ",".join(modules)] if modules else [])]


def start():
    """Start the process that forks; return what ends it."""
    if not hasattr(os, "fork"):
        return lambda: None
    folder = os.environ[VARIABLE] = tempfile.mkdtemp()
    around = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONWARNINGS")}
    process = subprocess.Popen(
        [*python(), __file__, "serve", folder], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=around,
        start_new_session=True,
    )  # fmt: skip
    process.stdout.read(1)  # it listens

    def end():
        with process:
            process.stdin.close()
        shutil.rmtree(folder)
        os.environ.pop(VARIABLE)

    return end


# ---- the process that asks ---------------------------------------------------------------------------------------


def _connection(folder, name):
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(os.path.join(folder, name))
    return connection


def ask(modules, arguments):
    """Let a fork do it; return how it ended."""
    folder = os.environ.get(VARIABLE)
    if not folder:
        os.execv(sys.executable, [sys.executable, *arguments])
    with _connection(folder, "start") as starting:
        starting.sendall(modules.encode())
        assert starting.recv(1), f"the import of {modules} failed"
    with _connection(folder, modules) as connection:
        socket.send_fds(connection, [b"\n"], [0, 1, 2])
        connection.sendall(json.dumps([arguments, os.getcwd(), dict(os.environ)]).encode() + b"\n")
        return int(connection.makefile().readline())


# ---- the process that forks --------------------------------------------------------------------------------------


def serve(folder):
    """Import what is asked for in a process of its own, and fork that; return a request in a fork alone."""
    listener, zygotes = _listener(folder, "start"), {}
    os.write(1, b"\n")
    os.dup2(2, 1)
    while True:
        ready, _, _ = select.select([listener, 0], [], [])
        if 0 in ready:  # closed
            for connection, _ in zygotes.values():
                connection.close()
                os.wait()
            os._exit(0)
        with listener.accept()[0] as connection, contextlib.suppress(ConnectionError):  # who asked may be gone
            modules = connection.recv(1000).decode()
            if not modules:
                continue
            if modules not in zygotes:
                mine, theirs = socket.socketpair()
                if not os.fork():
                    for opened in (listener, mine, *(connection for connection, _ in zygotes.values())):
                        opened.close()
                    return _forks(folder, modules, theirs)
                theirs.close()
                zygotes[modules] = mine, mine.recv(1)
            connection.sendall(zygotes[modules][1])


def _listener(folder, name):
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(os.path.join(folder, name))
    listener.listen(64)
    return listener


def _forks(folder, modules, parent):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in modules.split(","):
            with contextlib.suppress(ModuleNotFoundError):  # a test may need less than what is not installed
                importlib.import_module(name)
    gc.collect()
    gc.freeze()
    listener = _listener(folder, modules)
    read, write = os.pipe()
    os.set_blocking(write, False)
    signal.set_wakeup_fd(write)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    running = {}  # connections by the forks that serve them
    parent.sendall(b"\n")
    while True:
        ready, _, _ = select.select([listener, parent, read, *running.values()], [], [])
        if parent in ready:  # it has ended
            for process in running:
                os.kill(process, signal.SIGKILL)
                os.waitpid(process, 0)
            os._exit(0)
        if read in ready:
            os.read(read, 1000)
        for process, connection in list(running.items()):
            ended, status = os.waitpid(process, os.WNOHANG)
            if ended:
                with contextlib.suppress(ConnectionError):
                    connection.sendall(b"%d\n" % os.waitstatus_to_exitcode(status))
            elif connection in ready:  # who asked is gone
                os.kill(process, signal.SIGKILL)
                os.waitpid(process, 0)
            else:
                continue
            running.pop(process).close()
        if listener in ready:
            connection = listener.accept()[0]
            _, files, _, _ = socket.recv_fds(connection, 1, 3)
            with connection.makefile() as asked:
                text = asked.readline()
            if not text.endswith("\n"):  # who asked was gone before it had said what it wants
                connection.close()
                for file in files:
                    os.close(file)
                continue
            request = json.loads(text)
            process = os.fork()
            if not process:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                for number, file in enumerate(files):
                    os.dup2(file, number)
                for opened in (listener, parent, connection, *running.values()):
                    opened.close()
                for file in (*files, read, write):
                    os.close(file)
                return request
            for file in files:
                os.close(file)
            running[process] = connection


# ---- a fork ------------------------------------------------------------------------------------------------------


def become(folder, environment):
    """Have the surroundings of a Python that begins there."""
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    tempfile.tempdir = None


def go_on(arguments):
    """Run what the arguments of Python say."""
    options = []
    while arguments[0].startswith("-") and arguments[0] not in CODES:
        option, *arguments = arguments
        assert option in ("-W", "-u"), f"{option}: start a Python without anything imported"
        if option == "-u":
            sys.stdout.reconfigure(write_through=True)
        else:
            options.append(arguments.pop(0))
    said = [*filter(None, os.environ.get("PYTHONWARNINGS", "").split(",")), *options]
    sys.warnoptions[:] = said
    warnings._processoptions(said)
    how, *rest = arguments
    first = {"-c": "", "-m": os.getcwd()}.get(how, os.path.dirname(os.path.realpath(how)))
    sys.path[:1] = [first, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    if importlib.util.find_spec("sitecustomize"):
        importlib.import_module("sitecustomize")
    if how == "-c":
        code, *rest = rest
        sys.argv[:] = ["-c", *rest]
        main = sys.modules["__main__"] = types.ModuleType("__main__")
        exec(compile(code, "<string>", "exec"), vars(main))
    elif how == "-m":
        sys.argv[:] = rest
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv[:] = arguments
        runpy.run_path(how, run_name="__main__")


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        arguments, folder, environment = serve(sys.argv[2])
        become(folder, environment)
        go_on(arguments)
    else:
        ended = ask(sys.argv[1], sys.argv[2:])
        if ended < 0:
            if -ended != signal.SIGKILL:
                signal.signal(-ended, signal.SIG_DFL)
            os.kill(os.getpid(), -ended)
        sys.exit(ended)
