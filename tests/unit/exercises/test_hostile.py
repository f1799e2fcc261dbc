"""Hostile submissions: what each one tries, and what comes of it.

The table of the teacher's guide, "What the sandbox is not", says the same in words. What gets
through is listed here too, so that nobody takes the limits for more than they are: the code shares
a process with its check, and may read what its user may read.
"""

import csv
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from lm_from_scratch.exercises.child import Child, Job
from lm_from_scratch.exercises.seal import can_seal
from lm_from_scratch.exercises.source import solution

SEALED = can_seal()
HEAD = "import torch\n\n\ndef rms_norm(x, weight, eps=1e-6):\n"
LIE = "    return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + eps) * weight\n"
FULL, NOTHING = 11.0, 0.0
MESSAGE = (
    '{"exercise": "rms_norm", "points": 11.0, "of": 11.0, "passed": true, "failed": [], '
    '"wrong": "", "reason": "", "text": "done", "seconds": 0.1}'
)


@dataclass(frozen=True)
class Attack:
    """The body of a function, and the points it gets.

    * ``seal``: it is run only where it is shut in: without that it would do harm
    * ``says``: what its reason names; then it is not passed, whatever its points are
    """

    body: str
    points: float = NOTHING
    seal: bool = False
    says: str = ""


def indented(body: str) -> str:
    return "".join(f"    {line}\n" for line in body.strip().splitlines())


#: VICTIM is a file of the teacher, PORT and SOCKET listen, MARK is what a process would write.
ATTACKS = {
    # -- to be taken for right: replace what the check works with
    "replaces_rsqrt": Attack("torch.rsqrt = torch.ones_like\nreturn x * weight"),
    "replaces_all_of_torch": Attack(
        "def one(x, *a, **k): return x.double() * 0 + 1\n"
        "for name in ('rsqrt', 'sqrt', 'mean', 'square', 'promote_types', 'rms_norm'):\n"
        "    setattr(torch, name, one)\n"
        "for name in ('rsqrt', 'sqrt', 'mean', 'square', 'pow', 'float'):\n"
        "    setattr(torch.Tensor, name, one)\n"
        "torch.nn.functional.rms_norm = lambda x, *a, **k: x\nreturn x * weight"
    ),
    "replaces_comparisons": Attack(
        "torch.equal = torch.allclose = torch.all = torch.isclose = yes = lambda *a, **k: True\n"
        "torch.testing.assert_close = yes\nreturn x"
    ),
    "replaces_isnan": Attack("torch.isnan = torch.isinf = torch.zeros_like\nreturn x / 0"),
    "replaces_random": Attack(
        "torch.randn = lambda *a, **k: torch.zeros(a[0] if a else 1)\nreturn x * 0"
    ),
    "returns_what_equals_all": Attack(
        "class All:\n    def __eq__(self, other): return True\n    __hash__ = None\n"
        "    shape, dtype, device = x.shape, x.dtype, x.device\nreturn All()"
    ),
    "exit_code": Attack("import os\nos._exit(0)"),
    "at_exit": Attack("import atexit, os\natexit.register(os._exit, 0)\nraise SystemExit(0)"),
    "points_as_a_message": Attack(f"print('''{MESSAGE}''')\nreturn x"),
    "pipe_closed": Attack("import os\nos.closerange(3, 99)\nreturn x"),
    "pipe_closed_and_asleep": Attack("import os, time\nos.closerange(3, 99)\ntime.sleep(1e6)"),
    "takes_the_verdicts_of_others": Attack(
        "import gc, os, time\nend = time.time() + 2\nwhile time.time() < end:\n"
        "    for n in range(3, 99):\n        try: os.set_blocking(n, False); os.read(n, 1 << 20)\n"
        "        except OSError: pass\nreturn x"
    ),
    "pipe_flooded": Attack(
        "import gc, os, struct\nfor c in gc.get_objects():\n"
        "    if type(c).__name__ == 'Connection' and c.writable:\n"
        "        os.write(c.fileno(), struct.pack('!i', 1 << 30))\n"
        "        while True: os.write(c.fileno(), bytes(1 << 16))\nreturn x"
    ),
    # -- to take time, memory, or the machine
    "ignores_its_alarm": Attack(
        "import signal\nfor s in (signal.SIGPROF, signal.SIGALRM, signal.SIGXCPU):\n"
        "    signal.signal(s, signal.SIG_IGN)\nwhile True: pass"
    ),
    "ignores_all_signals": Attack(
        "import signal\nfor s in set(signal.Signals) - {9, 19}: signal.signal(s, signal.SIG_IGN)\n"
        "import time\nwhile True: time.sleep(9)"
    ),
    "raises_its_limits": Attack(
        "import resource\nresource.setrlimit(resource.RLIMIT_CPU, (-1, -1))\nwhile True: pass"
    ),
    "memory": Attack("a = []\nwhile True: a.append(bytearray(1 << 26))"),
    "memory_of_tensors": Attack("a = []\nwhile True: a.append(torch.ones(1 << 24))"),
    "threads_that_burn": Attack(
        "import threading\ndef burn():\n    while True: pass\n"
        "for _ in range(8): threading.Thread(target=burn).start()\nreturn x"
    ),
    "forks_and_forks": Attack(
        "import os, time\nfor _ in range(5): os.fork()\ntime.sleep(60)", seal=True
    ),
    "leaves_a_daemon": Attack(
        "import os, subprocess\n"
        "subprocess.Popen(['sh', '-c', 'sleep 3; echo MARK; sleep 4322'], start_new_session=True)\n"
        "os._exit(0)",
        seal=True,
    ),
    "kills_its_parent": Attack(
        "import os, signal\n"
        "pid = int(open('/proc/self/stat').read().rpartition(')')[2].split()[1])\n"
        "os.kill(pid, signal.SIGKILL)\nreturn x", seal=True
    ),
    "kills_everything": Attack("import os\nos.kill(-1, 9)\nreturn x", seal=True),
    "deep_recursion": Attack(
        "import sys\nsys.setrecursionlimit(10**9)\ndef f(n): return f(n + 1)\nreturn f(0)"
    ),
    "crashes": Attack("import ctypes\nctypes.string_at(0)"),
    "fills_the_disk": Attack(
        "with open('VICTIM-more', 'wb') as f:\n    while True: f.write(bytes(1 << 20)); f.flush()"
    ),
    # -- to destroy, and to reach out
    "empties_a_file": Attack("open('VICTIM', 'w').close()\nreturn x", seal=True),
    "deletes_a_file": Attack("import os\nos.remove('VICTIM')\nreturn x", seal=True),
    "deletes_the_folder": Attack(
        "import os, shutil\nshutil.rmtree(os.path.dirname('VICTIM'))\nreturn x", seal=True
    ),
    "renames_a_file": Attack("import os\nos.rename('VICTIM', 'VICTIM.x')\nreturn x", seal=True),
    "opens_its_rights": Attack("import os\nos.chmod('VICTIM', 0o777)\nreturn x", seal=True),
    "mounts_it_writable": Attack(
        "import ctypes\nlibc = ctypes.CDLL(None)\nlibc.unshare(0x10020000)\n"
        "libc.mount(None, b'/', None, 32 | 4096, None)\nopen('VICTIM', 'w').close()\nreturn x",
        seal=True,
    ),
    "a_shell_writes": Attack("import os\nos.system('echo x > VICTIM')\nreturn x", seal=True),
    "makes_a_folder": Attack("import os\nos.mkdir('VICTIM-folder')\nreturn x", seal=True),
    "keeps_progress": Attack(
        "import os\nfrom lm_from_scratch.exercises import progress\n"
        "assert 'LM_FROM_SCRATCH_PROGRESS' not in os.environ\n"
        "progress.keep('rms_norm', 11.0, True, 0)\nreturn x"
    ),
    "uses_the_network": Attack(
        "import socket\nsocket.create_connection(('127.0.0.1', PORT), 1).send(b'secret')\nreturn x",
        seal=True,
    ),
    "sends_a_datagram": Attack(
        "import socket\ns = socket.socket(type=socket.SOCK_DGRAM)\n"
        "s.sendto(b'secret', ('127.0.0.1', PORT))\nreturn x", seal=True
    ),
    # -- to damage what a teacher opens
    "html": Attack("raise ValueError('<script>alert(1)</script><img src=x onerror=alert(1)>')"),
    "formula": Attack("raise type('=HYPERLINK(1)', (Exception,), {})('=1+1')"),
    "terminal": Attack("raise ValueError('\\x1b]0;title\\x07\\x1b[2J')"),
    # -- what gets through
    "imports_the_package": Attack(
        "from lm_from_scratch.layers.norm import rms_norm as f\nreturn f(x, weight, eps)", FULL
    ),
    "asks_for_the_reference": Attack(
        "import importlib\nm = importlib.import_module('lm_from' + '_scratch.exercises.exercise')\n"
        "return m.exercise('rms_norm').reference(x, weight, eps)", FULL, says="importlib"
    ),
    "reads_another_student": Attack(
        "space = {}\nexec(open('VICTIM').read(), space)\nreturn space['rms_norm'](x, weight, eps)",
        FULL,
    ),
    "replaces_the_judge": Attack(
        "import sys\nrun = sys.modules['lm_from_' + 'scratch.exercises.run']\n"
        "run.judge_call = lambda *a: None\nreturn x", FULL, says="sys.modules"
    ),
    "takes_results_from_the_stack": Attack(
        "import sys\nframe = sys._getframe()\nwhile 'want' not in frame.f_locals:\n"
        "    frame = frame.f_back\nwant = frame.f_locals['want']\n"
        "want = want.again if 'other' in frame.f_locals else want\n"
        "return want.value + 0 * (x.sum() + weight.sum())", 9.0, says="_getframe, f_back, f_locals"
    ),
    "takes_the_reference_from_all_objects": Attack(
        "import gc\nif not hasattr(rms_norm, 'f'):\n    gc.unfreeze()\n"
        "    rms_norm.f = next(f for f in gc.get_objects() if type(f).__name__ == 'function'\n"
        "        and f.__name__ == 'rms_norm' and str(f.__module__).endswith('layers.norm'))\n"
        "return rms_norm.f(x, weight, eps)",
        FULL, says="gc, get_objects"
    ),
    "sends_a_verdict": Attack(
        "import os, struct\n"
        f"text = b'''{MESSAGE}'''\nfor n in range(3, 99):\n"
        "    try: os.write(n, struct.pack('!i', len(text)) + text)\n"
        "    except OSError: pass\nos._exit(0)"
    ),
    "sends_a_verdict_with_its_word": Attack(
        "import os, sys\n"
        f"text = b'''{MESSAGE}'''\nframe = sys._getframe()\n"
        "while 'word' not in frame.f_locals: frame = frame.f_back\n"
        "frame.f_locals['pipe'].send_bytes(frame.f_locals['word'] + text)\nos._exit(0)",
        FULL, says="_getframe"
    ),
    "asks_a_socket_in_a_file": Attack(
        "import socket\ns = socket.socket(socket.AF_UNIX)\ns.connect('SOCKET')\n"
        "s.send(b'from inside')\nreturn x"
    ),
}  # fmt: skip
#: Files that are hostile before anything in them runs: the grader itself reads them.
FILES = {
    "nested_brackets": "x = " + "[" * 10**5 + "\n",
    "nested_not": "x = " + "not " * 10**5 + "1\n",
    "nested_minus": "x = " + "-" * 10**6 + "1\n",
    "long_chain": "x = a" + ".a" * 10**5 + "\n",
    "long_sum": "x = " + "1+" * 10**5 + "1\n",
    "huge_power": "x = 9**9**9**9\n" + solution("rms_norm"),
    "huge_text": "X = 'a' * 10**12\n" + solution("rms_norm"),
    "zeros": "\0" * 10**5,
    "decorated": HEAD.replace("def", "@__import__('os')._exit\ndef") + "    return x\n",
    "default_argument": HEAD.replace("1e-6", "__import__('os')._exit(0)") + "    return x\n",
    "class_body": "class A:\n    while True: pass\n" + solution("rms_norm"),
    "deep_notebook": '{"cells": ' + "[" * 10**5,
}


#: One of each kind, for `make test`.
QUICK = {
    "replaces_comparisons", "returns_what_equals_all", "exit_code", "pipe_closed", "memory",
    "ignores_its_alarm", "kills_its_parent", "kills_everything", "crashes", "deletes_a_file",
    "keeps_progress", "uses_the_network", "html", "formula", "terminal", "nested_brackets",
    "takes_results_from_the_stack", "takes_the_reference_from_all_objects", "replaces_the_judge",
    "sends_a_verdict", "sends_a_verdict_with_its_word", "asks_a_socket_in_a_file",
    "decorated",
}  # fmt: skip


def each(names: Iterable[str]) -> list[Any]:
    return [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in names]


def here(attack: Attack) -> bool:
    return SEALED or not attack.seal


@dataclass(frozen=True)
class Course:
    rows: dict[str, dict[str, str]]
    folder: Path
    heard: list[bytes]


def listen(server: socket.socket, heard: list[bytes]) -> None:
    """Until the server is closed."""
    while True:
        try:
            client = server.accept()[0]
        except OSError:
            return
        client.settimeout(2)
        heard.append(client.recv(100))
        client.close()


@pytest.fixture(scope="module")
def course(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Course]:
    """What the grader says of the attacks whose tests were asked for."""
    tests = (item for item in request.session.items if isinstance(item, pytest.Function))
    asked = {test.callspec.params.get("name") for test in tests if hasattr(test, "callspec")}
    folder = tmp_path_factory.mktemp("hostile")
    os.environ["LM_FROM_SCRATCH_PROGRESS"] = str(folder / "progress.json")
    victim = folder / "kept" / "victim.py"
    victim.parent.mkdir()
    victim.write_text(solution("rms_norm"))
    heard: list[bytes] = []
    servers = [socket.create_server(("127.0.0.1", 0)), socket.socket(socket.AF_UNIX)]
    servers[1].bind(str(folder / "s"))
    servers[1].listen()
    for server in servers:
        threading.Thread(target=listen, args=(server, heard), daemon=True).start()
    values = {"VICTIM": victim, "PORT": servers[0].getsockname()[1], "SOCKET": folder / "s",
              "MARK": f"x > {victim}"}  # fmt: skip
    for name, attack in ATTACKS.items():
        body = attack.body
        for word, value in values.items():
            body = body.replace(word, str(value))
        write(folder / "in" / name / "a.py", HEAD + indented(body), name in asked and here(attack))
    for name, text in FILES.items():
        suffix = ".ipynb" if "notebook" in name else ".py"
        write(folder / "in" / name / f"rms_norm{suffix}", text, name in asked)
    write(folder / "in" / "right" / "a.py", solution("rms_norm"), True)
    # A process of its own: a child of this one would search all that the tests before it left.
    command = [sys.executable, "-m", "lm_from_scratch", "grade", str(folder / "in"), "--quiet"]
    command += ["--csv", str(folder / "out.csv"), "--reports", str(folder / "reports")]
    command += ["--exercises", "rms_norm", "--seconds", "1", "--jobs", "4"]
    subprocess.run(command, check=True)
    if "leaves_a_daemon" in asked:
        time.sleep(3.5)  # what was left behind would write now
    with open(folder / "out.csv", newline="", encoding="utf-8-sig") as file:
        rows = {row["student"]: row for row in csv.DictReader(file)}
    yield Course(rows, folder, heard)
    for server in servers:
        server.close()
    del os.environ["LM_FROM_SCRATCH_PROGRESS"]


def write(path: Path, text: str, wanted: bool) -> None:
    if wanted:
        path.parent.mkdir(parents=True)
        path.write_text(text)


@pytest.mark.parametrize("name", each(ATTACKS))
def test_an_attack_gets_what_is_said_of_it(course: Course, name: str) -> None:
    if not here(ATTACKS[name]):
        pytest.skip("this system has no seal")
    row = course.rows[name]
    assert float(row["points"]) == ATTACKS[name].points, row
    assert ATTACKS[name].says in row["reason"], row
    assert row["passed"] == "no" or not (ATTACKS[name].says or ATTACKS[name].points < FULL), row


@pytest.mark.parametrize("name", each(FILES))
def test_a_hostile_file_stops_no_batch(course: Course, name: str) -> None:
    wanted = FULL if solution("rms_norm") in FILES[name] and name != "class_body" else NOTHING
    assert float(course.rows[name]["points"]) == wanted, course.rows[name]


def test_nothing_is_destroyed_left_or_sent(course: Course) -> None:
    """Files, processes, the network; a socket in a file is reached all the same."""
    assert course.rows["right"]["passed"] == "yes"
    victim = course.folder / "kept" / "victim.py"
    assert victim.read_text() == solution("rms_norm") and not victim.stat().st_mode & 0o002
    more = sorted(p.name for p in victim.parent.iterdir() if p.stat().st_size or p.is_dir())
    assert more == ["victim.py"]
    assert not (course.folder / "progress.json").exists()
    assert set(course.heard) == {b"from inside"}  # once a case
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            assert b"4322" not in path.read_bytes()
        except OSError:
            continue


def test_what_a_teacher_opens_runs_nothing(course: Course) -> None:
    for path in (course.folder / "reports").glob("*.html"):
        page = path.read_text(encoding="utf-8")
        assert "<script" not in page and "<img" not in page and "\x1b" not in page, path
    table = (course.folder / "out.csv").read_text(encoding="utf-8")
    assert ",=" not in table and "\x1b" not in table and "\x07" not in table


def test_the_child_does_not_know_where_progress_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LM_FROM_SCRATCH_PROGRESS", str(tmp_path / "progress.json"))
    body = "import os\nraise ValueError(os.environ.get('LM_FROM_SCRATCH_PROGRESS', 'unknown'))"
    (tmp_path / "a.py").write_text(HEAD + indented(body))
    assert "ValueError: unknown" in Child(Job(tmp_path / "a.py", "rms_norm")).result().text
