"""The ``omniqueue`` command. Status 0 is success, 1 a failure, 2 a wrong command line or configuration."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from omniqueue import __version__, cli_ops, errors

DEFAULT_CONFIG = "glm_image_tiny"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    parser = build_parser()
    options = parser.parse_args(arguments)
    try:
        if options.command is None:
            return _part(parser, options)
        return int(options.run(options))
    except KeyboardInterrupt:
        sys.stderr.write("omniqueue: interrupted\n")
        return 130
    except errors.ConfigError as exc:
        sys.stderr.write(f"omniqueue: {exc.message}\n")
        return 2
    except errors.OmniqueueError as exc:
        sys.stderr.write(f"omniqueue: {exc.message}\n")
        return 1


def build_parser() -> argparse.ArgumentParser:
    """The command line, for main and for the documentation's tests."""
    parser = argparse.ArgumentParser(
        prog="omniqueue",
        description="Serve a multi-stage generative pipeline: one Celery worker a stage, joined by queues.",
        epilog="One part of a deployment: --stage-id N or --omni-router, each with --stage-configs-path.",
    )
    parser.add_argument("--version", action="version", version=f"omniqueue {__version__}")
    parser.add_argument("--stage-id", type=int, metavar="N", help="run the worker of stage N")
    parser.add_argument("--omni-router", action="store_true", help="run the HTTP router")
    parser.add_argument("--stage-configs-path", metavar="FILE", help="the stage config")
    _add_model(parser)
    _add_bind(parser)
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", title="commands")
    _add_up(commands)
    _add_demo(commands)
    _add_validate(commands)
    cli_ops.add(commands)
    _add_tiny(commands)
    return parser


def _add_model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", metavar="M", help="checkpoint folder or hub id (default: the config's)")
    parser.add_argument(
        "--served-model-name",
        metavar="NAMES",
        help="what clients give as model, comma-separated (default: the config's)",
    )


def _add_bind(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--host", default="127.0.0.1", help="address the router binds (default: %(default)s)")
    parser.add_argument("--port", type=cli_ops.port, default=8000, help="port of the router (default: %(default)s)")


def _add_up(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    up = commands.add_parser("up", help="run everything for one machine: queue, a worker per stage, router")
    up.add_argument(
        "config",
        nargs="*",
        default=[DEFAULT_CONFIG],
        help="stage configs, each a path or a shipped name; several share queue and router (default: tiny GLM-Image)",
    )
    _add_model(up)
    _add_bind(up)
    up.add_argument(
        "--replicas",
        metavar="STAGE=N",
        type=_replicas,
        action="append",
        default=[],
        help="workers of a stage (default: 1)",
    )
    up.add_argument(
        "--run-dir", type=Path, help="folder of sockets and logs (default: one per port in the temporary folder)"
    )
    up.add_argument("--redis-url", help="use this Redis instead of an embedded Valkey")
    up.set_defaults(run=_up)


def _add_demo(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    demo = commands.add_parser("demo", help="start everything, turn a prompt into a picture on disk, stop")
    demo.add_argument("--prompt", default="A red apple on a white table")
    demo.add_argument("--size", default="256x256")
    demo.add_argument("--out", type=Path, default=Path("out"), help="folder of the picture (default: %(default)s)")
    demo.set_defaults(run=_demo)


def _add_validate(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    validate = commands.add_parser("validate", help="check a stage config and show the resolved plan; loads no engine")
    validate.add_argument("file")
    validate.add_argument("--model", metavar="M", help="checkpoint folder or hub id")
    validate.add_argument("--json", action="store_true", help="the plan as JSON")
    validate.set_defaults(run=_validate)


def _add_tiny(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    tiny = commands.add_parser(
        "tiny-checkpoint", help="write a small checkpoint in a published layout: random weights, or SmolLM2's"
    )
    tiny.add_argument("architecture", choices=["smollm2", "stable_audio", "wan"])
    tiny.add_argument("--out", type=Path, required=True, help="folder to write")
    tiny.add_argument("--seed", type=int, default=0)
    tiny.set_defaults(run=_tiny)


def _replicas(text: str) -> tuple[int, int]:
    stage, _, count = text.removeprefix("stage").partition("=")
    try:
        pair = int(stage), int(count)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not STAGE=N, such as stage1=2") from None
    if not 1 <= pair[1] <= 64:
        raise argparse.ArgumentTypeError("the number of replicas must be from 1 to 64")
    return pair


def _part(parser: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    """The form with --stage-id or --omni-router: becomes the part's own command, with the same process id."""
    if options.stage_id is not None and options.omni_router:
        parser.error("--stage-id and --omni-router exclude each other: a process is one stage or the router")
    if options.stage_id is None and not options.omni_router:
        parser.print_help(sys.stderr)
        return 2
    flag = "--omni-router" if options.omni_router else "--stage-id"
    if not options.stage_configs_path:
        parser.error(f"{flag} needs --stage-configs-path FILE")
    from omniqueue import catalog, settings, topology, up

    os.environ["OMNIQUEUE_STAGE_CONFIGS_PATH"] = str(topology.find_config(options.stage_configs_path))
    for name in ("model", "served_model_name"):
        if getattr(options, name):
            os.environ[f"OMNIQUEUE_{name.upper()}"] = getattr(options, name)
    pipe = catalog.load(settings.load()).pipelines[0]
    command = up.router_command(options.host, options.port)
    if options.stage_id is not None:
        try:
            command = up.worker_command(pipe.stage(options.stage_id).queue)
        except KeyError as exc:
            parser.error(str(exc.args[0]))
    return os.execv(command[0], command)


def _up(options: argparse.Namespace) -> int:
    from omniqueue import up

    wanted = up.Options(
        config=os.pathsep.join(options.config),
        port=options.port,
        host=options.host,
        model=options.model or _default_model(options.config),
        served_model_name=options.served_model_name,
        replicas=dict(options.replicas),
        run_dir=options.run_dir,
        redis_url=options.redis_url,
    )
    with up.running(wanted, _say) as machine:
        names = ", ".join(next(iter(pipe.served_model_names), pipe.name) for pipe in machine.pipes)
        _say(f"ready    http://{up.address(options.host, options.port)} serves {names}; Ctrl-C stops everything")
        machine.run()
        _say("stopping")
    return 0


def _default_model(configs: list[str]) -> str | None:
    """The tiny checkpoint for the tiny config."""
    if [Path(config).stem for config in configs] != [DEFAULT_CONFIG] or os.environ.get("OMNIQUEUE_MODEL"):
        return None
    from omniqueue import demo

    return str(demo.tiny_model())


def _demo(options: argparse.Namespace) -> int:
    from omniqueue import demo

    return demo.run(options.prompt, options.size, options.out, _say)


def _validate(options: argparse.Namespace) -> int:
    import json

    from omniqueue import configfile

    pipe = configfile.load(options.file, model=options.model)
    configfile.check_engines(pipe)
    if options.json:
        sys.stdout.write(json.dumps(configfile.as_json(pipe), indent=2) + "\n")
    else:
        sys.stdout.write(configfile.as_text(pipe) + "\n")
    return 0


def _tiny(options: argparse.Namespace) -> int:
    from omniqueue.engines import smollm2, tiny_diffusion

    if options.architecture == "smollm2":
        smollm2.write(options.out, _say)
    else:
        tiny_diffusion.write(options.architecture, options.out, options.seed, _say)
    _say(f"wrote    {options.out}")
    return 0


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
