"""Which device a stage gets, when the process sees only some of the machine's."""

from __future__ import annotations

from omniqueue import errors


def logical(devices: str | None, visible: str | None) -> str | None:
    """Turn a stage's physical device ids into positions in the visible list, which is what engines count in.

    ``devices`` is what the stage config says ("1" or "0,1"), ``visible`` is CUDA_VISIBLE_DEVICES; None or empty means
    that all devices are visible and the ids stand. A process that sees exactly as many devices as the stage needs was
    given those for it: they are used, whatever their ids, so that one config serves replicas on any device. Ids that
    are not in the visible list but are positions in it are taken as logical already: a container numbers its devices
    from 0. Raises ConfigError for anything else.
    """
    if devices is None or not (visible or "").strip():
        return devices
    seen = [name.strip() for name in str(visible).split(",")]
    wanted = [name.strip() for name in devices.split(",")]
    if all(name in seen for name in wanted):
        return ",".join(str(seen.index(name)) for name in wanted)
    if len(seen) == len(wanted):
        return ",".join(str(position) for position in range(len(seen)))
    if all(name.isdecimal() and int(name) < len(seen) for name in wanted):
        return ",".join(wanted)
    raise errors.ConfigError(
        f"The stage config asks for device {devices}, but this process sees only {visible} (CUDA_VISIBLE_DEVICES); "
        "change devices in the stage config or widen CUDA_VISIBLE_DEVICES.",
        param="devices",
    )
