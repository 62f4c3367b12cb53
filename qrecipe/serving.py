"""Server: start, attach, status, stop. The watching is done by one supervisor process a server (supervisor.py)."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
import uuid
from contextlib import suppress
from dataclasses import asdict, astuple, dataclass, field
from pathlib import Path

from filelock import FileLock, Timeout

from .checks import check_number
from .errors import BadInput, ServerFailed
from .paths import ROOM, state_dir, writable, write_whole
from .processes import Pid, end_all
from .recipe import ServeRecipe
from .start_checks import check_start, given_key, key_for, new_log, process_argv
from .supervisor import ENDED, address, living_owners

SHARED = "QRECIPE_SHARED"  # in a chapter's environment: the token of the server that its run started
START_LIMIT = 1200.0  # seconds that a start may take before it is given up
COME_UP = 20.0  # seconds that a supervisor has to write its first state
OPEN_PATHS = "/health, /metrics, /version, /tokenize, /detokenize, /invocations, /load, /docs"  # vLLM 0.27.0


@dataclass(frozen=True)
class Server:
    """A server that answers: one that the book started (`folder` is set) or a foreign one (`folder` is None)."""

    base_url: str
    model: str
    api_key: str = field(repr=False)
    root: str
    max_model_len: int | None
    log: Path | None = None
    folder: Path | None = None
    recipe: ServeRecipe | None = None
    ready_seconds: float | None = None

    @classmethod
    def start(
        cls, recipe: ServeRecipe, *, keep: bool = False, grace: float = 0.0, new_key: bool = False,
        log_dir: Path | None = None, on_progress=None,
    ) -> "Server":  # fmt: skip
        """Start a server for this recipe, or join the running one with the same flags, and wait until it answers.

        The calling process becomes an owner: when the last owner has gone for `grace` seconds the server is stopped,
        unless `keep`, which holds from when it is ready: a start that nobody waits for any more is ended. `new_key` gives
        it an API key of its own. `on_progress(seconds, log)` is called about four times a second while waiting. Raises BadInput before anything starts (port taken, model folder missing, GPU in use,
        other flags than the running server's) and ServerFailed when the start fails; then nothing is left running.
        """
        folder = launch(recipe, grace=grace, new_key=new_key, log_dir=log_dir)
        began, state = time.monotonic(), {"status": "died", "log": "", "why": "its state file is gone"}
        try:
            while (state := read_state(folder) or state)["status"] != "ready":
                if state["status"] in ENDED:
                    raise ServerFailed(failure_text(state))
                if time.monotonic() - began > START_LIMIT:
                    stop(recipe.port)
                    raise ServerFailed(f"the server did not answer within {START_LIMIT:.0f} s; its log: {state['log']}")
                if on_progress:
                    on_progress(time.monotonic() - state["started"], Path(state["log"]))
                time.sleep(0.25)
        except BaseException:
            leave(folder)
            raise
        if keep:
            (folder / "keep").touch()
        if on_progress:
            on_progress(None, Path(state["log"]))
        return cls.attach(f"http://{address(state['recipe']['host'])}:{recipe.port}/v1", folder=folder)

    @classmethod
    def attach(
        cls, base_url: str, api_key: str | None = None, *, model: str = "", folder: Path | None = None
    ) -> "Server":
        """Look at a running OpenAI-compatible server. The key comes from VLLM_API_KEY when none is given;
        OPENAI_API_KEY, which is another service's, is sent to nobody.

        Raises BadInput when nothing answers, when what answers is no such server, or when it does not serve `model`.
        """
        import httpx

        state = read_state(folder) if folder else {}
        own = (folder / "api-key").read_text() if state.get("key") else None
        key = (api_key or own or "").strip() or given_key() or "EMPTY"
        base_url, sent = base_url.rstrip("/"), {"Authorization": f"Bearer {key}"}
        if not base_url.startswith(("http://", "https://")):
            raise BadInput(f"{base_url!r} is no address of a server: expected something like http://127.0.0.1:8000/v1")
        try:
            reply = httpx.get(f"{base_url}/models", headers=sent, timeout=10, trust_env=False)
            listed = [] if reply.status_code in (401, 403) else reply.json()["data"]
            served = {m["id"]: m for m in listed if isinstance(m["id"], str)}
            first = served[model] if model in served else next(iter(served.values()), None)
        except (httpx.HTTPError, httpx.InvalidURL) as e:
            raise BadInput(
                f"no server answers at {base_url} ({type(e).__name__}): start one with 'qrecipe serve', or name the one that runs; a chapter whose base_url is empty starts its own"
            ) from None
        except (ValueError, KeyError, TypeError, RecursionError):
            hint = "" if base_url.endswith("/v1") else "; is /v1 missing at its end?"
            raise BadInput(
                f"{base_url}/models answered {reply.status_code}, but not as an OpenAI-compatible server does{hint}"
            ) from None
        if reply.status_code in (401, 403):
            which = "an" if key == "EMPTY" else "another"
            raise BadInput(f"{base_url} wants {which} API key: set VLLM_API_KEY in the environment")
        if first is None or model not in ("", first["id"]):
            raise BadInput(f"{base_url} does not serve {model!r}: it serves {list(served)}")
        longest = first.get("max_model_len")
        log, recipe = state.get("log") or os.environ.get("QRECIPE_LOG"), state.get("recipe")
        return cls(
            base_url, first["id"], key, str(first.get("root") or first["id"]), longest if isinstance(longest, int) else None, Path(log) if log else None,
            folder, ServeRecipe.from_dict(recipe) if recipe else None, state.get("ready_seconds"),
        )  # fmt: skip

    def leave(self, wait: float = 0.0) -> None:
        """This process no longer uses the server; with `wait`, stay until it has ended if it ends by that."""
        if self.folder:
            leave(self.folder, wait)

    def stop(self) -> dict:
        """Stop the server whoever uses it. Returns its last state. A foreign server is not ours to stop."""
        if not self.folder:
            raise BadInput(f"{self.base_url} was not started by this book: stop it where it was started")
        return stop(int(self.folder.name.removeprefix("port-")))


def server_folder(port: int) -> Path:
    """The folder of the server on this port: its state, owners and lock."""
    check_number(port, "port", 1024, 65535)
    folder = state_dir() / "servers" / f"port-{port}"
    writable(folder / "owners", mode=0o700)
    return folder


def launch(recipe: ServeRecipe, *, grace: float = 0.0, new_key: bool = False, log_dir: Path | None = None) -> Path:
    """Start the supervisor, or join the server that runs with these flags. Returns the server's folder without waiting."""
    folder = server_folder(recipe.port)
    writable(folder, room=ROOM)
    try:
        with FileLock(folder / "lock", timeout=60, mode=0o600):
            key = key_for(recipe, folder, new_key)
            state, now = read_state(folder), time.monotonic()
            deadline = min(now, state.get("started", now) if state.get("status") == "launching" else now) + COME_UP
            while state.get("status") in ("launching", "stopping") and time.monotonic() < deadline:
                time.sleep(0.1)  # a stop, or a start whose caller was killed
                state = read_state(folder)
            if state and state["status"] not in (*ENDED, "launching"):
                return join_running(state, recipe, folder, grace, key)
            if state:
                if os.environ.get(SHARED) == state["token"] and state["status"] in ("failed", "died"):
                    raise ServerFailed(failure_text(state))  # the run's own server: a second start would fail as well
                end_all(state["token"])
            check_start(recipe)
            start_supervisor(recipe, folder, grace, key, new_log(log_dir, recipe.port))
    except Timeout:
        raise ServerFailed(
            f"another start on port {recipe.port} holds {folder / 'lock'}: wait for it, or end that process"
        ) from None
    except OSError as e:
        raise BadInput(
            f"cannot start a server with its state in {folder} ({e.strerror or e}): mend that, or set QRECIPE_STATE"
        ) from None
    return folder


def join_running(state: dict, recipe: ServeRecipe, folder: Path, grace: float, key: str | None) -> Path:
    """Become an owner of the running server; BadInput says which flags differ."""
    differing = ServeRecipe.from_dict(state["recipe"]).differences(recipe)
    if key and not (state["key"] and key == (folder / "api-key").read_text()):
        differing.append(f"API key: it has {'another' if state['key'] else 'none'}, you give one")
    if differing:
        raise BadInput(
            f"a server with other flags runs on port {recipe.port} ({'; '.join(differing)}): stop it with 'qrecipe stop --port {recipe.port}', or choose another port"
        )
    join(folder, grace)
    return folder


def start_supervisor(recipe: ServeRecipe, folder: Path, grace: float, key: str | None, log: Path) -> None:
    """Write the first state and start the supervisor; return when it has started the server."""
    state = {
        "status": "launching", "token": uuid.uuid4().hex, "argv": process_argv(recipe), "recipe": asdict(recipe),
        "log": str(log), "key": bool(key), "started": time.monotonic(),
    }  # fmt: skip
    (folder / "keep").unlink(missing_ok=True)
    if key:
        write_whole(folder / "api-key", key, mode=0o600)
    write_whole(folder / "server.json", json.dumps(state, indent=1), mode=0o600)
    file = join(folder, grace)
    env = {k: v for k, v in os.environ.items() if k != "VLLM_API_KEY"} | ({"VLLM_API_KEY": key} if key else {})
    with open(log, "ab") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", "qrecipe.supervisor", str(folder), state["token"]],
            stdin=subprocess.DEVNULL, stdout=out, stderr=out, env=env, start_new_session=True,
        )  # fmt: skip
    while (read_state(folder) or state)["status"] == "launching":
        if process.poll() is not None:
            file.unlink(missing_ok=True)
            state |= {"status": "failed", "why": tail(log, 1)}
            write_whole(folder / "server.json", json.dumps(state), mode=0o600)
            raise ServerFailed(f"the supervisor ended before it started the server: {state['why']}. Log: {log}")
        time.sleep(0.05)


def join(folder: Path, grace: float = 0.0) -> Path:
    """Make this process (with the parent that it dies with) an owner of the server. Returns the owner's file."""
    me, *parent = Pid.users()
    file = folder / "owners" / f"{me.pid}-{me.ticks}.json"
    owner = {"processes": [astuple(p) for p in (me, *parent)], "grace": grace}
    write_whole(file, json.dumps(owner), mode=0o600)
    return file


def leave(folder: Path, wait: float = 0.0) -> None:
    """Take this process off the owners; with `wait`, stay up to that many seconds if the server ends by it."""
    me = Pid.of(os.getpid())
    (folder / "owners" / f"{me.pid}-{me.ticks}.json").unlink(missing_ok=True)
    deadline = time.monotonic() + wait
    while time.monotonic() < deadline:
        state = read_state(folder)
        if not state or state["status"] in ENDED or (folder / "keep").exists() or living_owners(folder):
            return
        time.sleep(0.1)


def read_state(folder: Path) -> dict:
    """The state of a server, "died" when its supervisor is gone; {} when there is none or it cannot be understood (it is put aside then)."""
    file = folder / "server.json"
    try:
        for _ in range(2):  # a second look: it may have ended in good order between file and process
            state = json.loads(file.read_text())
            for key in ("status", "token", "recipe", "log", "key", "started"):
                state[key]
            if state["status"] in (*ENDED, "launching") or Pid(*state["supervisor"]).alive():
                return state
        return state | {"status": "died", "why": "its supervisor was killed"}
    except FileNotFoundError:
        return {}
    except (ValueError, KeyError, TypeError):
        with suppress(OSError):
            shutil.move(file, file.with_suffix(".damaged"))
        return {}


def status(port: int | None = None) -> list[dict]:
    """The servers that this book knows, running or ended: state, owners, address."""
    folders = sorted((state_dir() / "servers").glob("port-*")) if port is None else [server_folder(port)]
    out = []
    for folder in folders:
        if state := read_state(folder):
            recipe, key = state["recipe"], folder / "api-key"
            out.append({
                "port": recipe["port"], "status": state["status"], "why": state.get("why"),
                "base_url": f"http://{address(recipe['host'])}:{recipe['port']}/v1", "model": recipe["model"],
                "log": state["log"], "owners": len(living_owners(folder)), "keep": (folder / "keep").exists(),
                "key_file": str(key) if state["key"] else None, "ready_seconds": state.get("ready_seconds"),
            })  # fmt: skip
    return out


def stop(port: int, seconds: float = 60.0) -> dict:
    """Stop the server on this port and wait until its processes are gone. Returns its last state ({} when there is none)."""
    folder = server_folder(port)
    state = read_state(folder)
    if not state:
        return {}
    deadline = time.monotonic() + seconds
    while (state := read_state(folder) or state)["status"] not in (*ENDED, "launching"):
        late = time.monotonic() > deadline
        with suppress(ProcessLookupError):
            os.kill(state["supervisor"][0], signal.SIGKILL if late else signal.SIGTERM)
        if late:  # its guard ends the server
            break
        time.sleep(0.2)
    if left := end_all(state["token"]):
        raise ServerFailed(f"processes {left} of the server on port {port} could not be ended")
    return read_state(folder)


def failure_text(state: dict) -> str:
    """Why a server did not come up: the log's own cause, its mend, and where the log is."""
    why, log = state.get("why"), state["log"]
    for name, place in (("log", Path(log).parent), ("state", state_dir() / "servers")):
        with suppress(OSError):
            if shutil.disk_usage(place).free < ROOM:
                return f"the server did not come up: {why}, and the disk of its {name} is full: free some of it. Log: {log}"
    if found := diagnosis(log):
        return f"{found['text']} - {found['cause']}. Mend: {found['mend']}. Log: {log}"
    return f"the server did not come up: {why}. Log: {log}"


def diagnosis(log: str | Path) -> dict | None:
    """The failure that a log names (text, cause, mend), None when it names none or cannot be read."""
    from .startup_log import read_log

    with suppress(Exception):  # an empty or unreadable log adds nothing
        return read_log(log).failure


def tail(log: str | Path, lines: int = 30) -> str:
    """The last lines of a log, 1,000 characters of each at most; "" when it cannot be read."""
    with suppress(OSError), open(log, "rb") as f:
        f.seek(max(0, os.fstat(f.fileno()).st_size - 20_000))
        last = f.read().decode("utf-8", "replace").rstrip().splitlines()[-lines:]
        return "\n".join(line if len(line) <= 1000 else f"{line[:1000]} ..." for line in last)
    return ""
