"""The commands of whoever is on call: status, doctor, autoscale; and models."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time

from omniqueue import errors

Commands = argparse._SubParsersAction


def add(commands: Commands[argparse.ArgumentParser]) -> None:
    """Add them to the command line."""
    _add_status(commands)
    _add_doctor(commands)
    _add_autoscale(commands)
    _add_models(commands)


def port(text: str) -> int:
    """A TCP port."""
    if not (text.isascii() and text.isdigit() and 0 < int(text) < 65536):
        raise argparse.ArgumentTypeError("must be from 1 to 65535")
    return int(text)


def _add_status(commands: Commands[argparse.ArgumentParser]) -> None:
    status = commands.add_parser("status", help="what waits, runs and is served, stage by stage")
    _add_where(status)
    status.add_argument("--watch", action="store_true", help="again and again, with rates, until Ctrl-C")
    status.add_argument(
        "--interval", type=_interval, default=2.0, metavar="SECONDS", help="between looks (default: %(default)s)"
    )
    status.add_argument("--json", action="store_true", help="as JSON, one object a look")
    status.set_defaults(run=_status)


def _add_doctor(commands: Commands[argparse.ArgumentParser]) -> None:
    doctor = commands.add_parser(
        "doctor", help="look at everything that has to hold, and say what to do; status 1 when something is broken"
    )
    _add_where(doctor)
    doctor.add_argument("--host", default="127.0.0.1", help="address that the router binds (default: %(default)s)")
    doctor.add_argument("--json", action="store_true", help="the findings as JSON")
    doctor.set_defaults(run=_doctor)


def _add_where(parser: argparse.ArgumentParser) -> None:
    """Which deployment: the environment's, or that of `omniqueue up` on this machine."""
    parser.add_argument("file", nargs="?", help="stage config (default: OMNIQUEUE_STAGE_CONFIGS_PATH)")
    parser.add_argument("--model", metavar="M", help="checkpoint folder or hub id (default: the config's)")
    parser.add_argument("--redis-url", help="its Redis (default: OMNIQUEUE_REDIS_URL)")
    parser.add_argument(
        "--port",
        type=port,
        default=8000,
        help="where neither is given: the port of a running `omniqueue up` (default: %(default)s)",
    )


def _add_autoscale(commands: Commands[argparse.ArgumentParser]) -> None:
    scale = commands.add_parser(
        "autoscale", help="start and stop workers on this machine, so that no stage's jobs wait too long"
    )
    _add_where(scale)
    scale.add_argument(
        "--limits",
        metavar="STAGE=LOW..HIGH",
        type=_limits,
        action="append",
        required=True,
        dest="limits",
        help="how many workers a stage may have, such as stage1=1..4; 0..4 stops them all while nothing comes",
    )
    scale.add_argument(
        "--devices",
        type=_devices,
        default=(),
        metavar="IDS",
        help="devices to share out among the workers, such as 0,1,2 (default: none, as on a CPU)",
    )
    for name, default, text in (
        ("--target-wait", 30.0, "how long a job may wait for a stage"),
        ("--cooldown", 60.0, "between two changes of a stage"),
        ("--window", 300.0, "over which arrivals are counted"),
    ):
        scale.add_argument(
            name, type=_interval, default=default, metavar="SECONDS", help=f"{text} (default: %(default)g)"
        )
    scale.set_defaults(run=_autoscale)


def _add_models(commands: Commands[argparse.ArgumentParser]) -> None:
    models = commands.add_parser(
        "models",
        help="which of vLLM-Omni's pipelines can be served, what their stages hand over, and why not the others",
    )
    models.add_argument("pipeline", nargs="?", help="one pipeline, in full")
    form = models.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="as JSON")
    form.add_argument("--markdown", action="store_true", help="all pipelines as a page, which is docs/models.md")
    models.set_defaults(run=_models)


def _interval(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0.1 <= seconds <= 3600:
        raise argparse.ArgumentTypeError("must be a number of seconds from 0.1 to 3600")
    return seconds


def _limits(text: str) -> tuple[int, int, int]:
    stage, _, span = text.removeprefix("stage").partition("=")
    low, _, high = span.partition("..")
    try:
        found = int(stage), int(low), int(high or low)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not STAGE=LOW..HIGH, such as stage1=1..4") from None
    if not 0 <= found[1] <= found[2] <= 64 or found[2] == 0:
        raise argparse.ArgumentTypeError(f"{text!r}: LOW must be from 0 to HIGH, and HIGH from 1 to 64")
    return found


def _devices(text: str) -> tuple[str, ...]:
    from omniqueue import checks

    if complaint := checks.devices(text):
        raise argparse.ArgumentTypeError(complaint)
    return tuple(part.strip() for part in text.split(","))


def _find(options: argparse.Namespace) -> None:
    """Set the environment to the deployment that the command line means."""
    from omniqueue import local, topology, up

    if options.redis_url:
        os.environ["OMNIQUEUE_REDIS_URL"] = options.redis_url
    elif not os.environ.get("OMNIQUEUE_REDIS_URL"):
        os.environ.update(local.told(up.Options(config="", port=options.port).folder()))
    if options.file:
        os.environ["OMNIQUEUE_STAGE_CONFIGS_PATH"] = str(topology.find_config(options.file))
    if options.model:
        os.environ["OMNIQUEUE_MODEL"] = options.model


def _status(options: argparse.Namespace) -> int:
    from omniqueue import catalog, settings, status, store

    _find(options)
    config = settings.load()
    known, records = catalog.load(config), store.Store.from_settings(config)
    before: status.Status | None = None
    while True:
        try:
            seen = status.look(known, records)
        except errors.BrokerUnavailable as exc:
            if not options.watch:
                raise
            _say(exc.message)
        else:
            screen = "\033[H\033[2J" if options.watch and sys.stdout.isatty() else ""
            text = json.dumps(status.as_json(seen)) if options.json else status.as_text(seen, before)
            _say(screen + text)
            before = seen
        if not options.watch:
            return 0
        time.sleep(options.interval)


def _doctor(options: argparse.Namespace) -> int:
    from omniqueue import doctor

    _find(options)
    findings = list(doctor.examine(options.host))
    if options.json:
        _say(json.dumps([finding.to_json() for finding in findings], indent=2))
    else:
        _say(doctor.as_text(findings))
    return 1 if any(finding.level == "error" for finding in findings) else 0


def _autoscale(options: argparse.Namespace) -> int:
    import shutil
    from pathlib import Path
    from tempfile import mkdtemp

    from omniqueue import autoscale, catalog, scaling, settings, store

    _find(options)
    config = settings.load()
    common = {"target_wait_s": options.target_wait, "cooldown_s": options.cooldown, "window_s": options.window}
    limits = {stage: scaling.Limits(low=low, high=high, **common) for stage, low, high in options.limits}
    folder = Path(mkdtemp(prefix="omniqueue-autoscale-"))
    pipelines, records = catalog.load(config).pipelines, store.Store.from_settings(config)
    scaler = autoscale.Autoscaler(pipelines, records, limits, options.devices, folder, _say)
    with autoscale.until_told() as stopping:
        scaler.run(stopping)
    shutil.rmtree(folder, ignore_errors=True)  # logs of workers that all ended as they should
    return 0


def _models(options: argparse.Namespace) -> int:
    from omniqueue import models, models_text

    version, known = models.read(_note)
    if options.pipeline:
        known = [models.find(known, options.pipeline)]
    if options.json:
        _say(json.dumps({"vllm_omni": version, "pipelines": [model.as_json() for model in known]}, indent=2))
    elif options.markdown:
        sys.stdout.write(models_text.as_markdown(version, known))
    else:
        _say(models_text.details(known[0]) if options.pipeline else models_text.as_text(version, known))
    return 0


def _note(line: str) -> None:
    sys.stderr.write(f"omniqueue: {line}\n")
    sys.stderr.flush()


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()
