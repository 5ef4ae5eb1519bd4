"""Everything that doctor looks at, in the order it is told.

Owns that order, and what each look needs of another. Leaves looking and judging to the files beside
it. Blocking, a minute at most but for the numeric probe; any thread. Writes nothing that stays,
takes no lock of the folder, and asks a running worker only for its status.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import psutil

from mlx_worker import local
from mlx_worker.config import Config, ModelEntry, home
from mlx_worker.doctor import device, duty, energy, gateway, machine, models, rows, storage
from mlx_worker.doctor.check import Check, Question, ask, ok, warning, within
from mlx_worker.doctor.device import Device, gb
from mlx_worker.local import Seen
from mlx_worker.logs import default_folder
from mlx_worker.models.locate import DEMO
from mlx_worker.power import power
from mlx_worker.serving import named

ROOM_SHARE = 0.8  # of the free memory that a model may take to be probed
STORAGE_S, NETWORK_S = 10.0, 25.0
DEVICE_S, PROBE_S = device.DEVICE_S + 5, rows.PROBE_S + 5


@dataclass(frozen=True)
class Wishes:
    """model: to probe; None: the default one if it fits beside what runs, else the demo pair."""

    model: str | None = None
    has_probe: bool = True


def examine(wishes: Wishes) -> Iterator[Check]:
    """Each line as it is known."""
    found = within(STORAGE_S, storage.settings, storage.UNREAD)
    host, mlx, seen = machine.look(), Device(), _seen()
    yield from machine.checks(host)

    def look_at_mlx() -> list[Check]:
        nonlocal mlx
        mlx = device.look()
        return device.checks(host, mlx, found.config.limits.memory_gb)

    yield from ask([Question("mlx", look_at_mlx, DEVICE_S)])
    yield from ask(_questions(found, mlx, seen, is_mac=host.is_mac))
    if wishes.has_probe and mlx.problem:
        yield ok("numbers", "not measured without mlx")
    elif wishes.has_probe:
        yield from ask([Question("numbers", lambda: _numbers(wishes, found, mlx, seen), PROBE_S)])


def _questions(
    found: storage.Settings, mlx: Device, seen: Seen, *, is_mac: bool
) -> Iterator[Question]:
    config = found.config
    budget = mlx.budget_bytes(config.limits.memory_gb)
    yield Question("disk", storage.look_at_disk, STORAGE_S)
    yield Question("folder", lambda: storage.look_at_folder(found), STORAGE_S)
    yield Question("config", lambda: storage.look_at_config(found), STORAGE_S)
    yield Question("settings", storage.look_at_settings, STORAGE_S)
    yield Question("models", lambda: models.checks(config, budget), STORAGE_S)
    yield Question("port", lambda: [_port(config, seen)], STORAGE_S)
    yield Question("service", lambda: [_service(seen)], STORAGE_S)
    yield Question("worker", lambda: [duty.worker_check(seen)])
    yield Question("gateway", lambda: _gateway(config, seen, is_mac=is_mac), NETWORK_S)
    yield Question("power", lambda: energy.checks(power()), STORAGE_S)


def _seen() -> Seen:
    """The worker of this folder; it doesn't answer, as far as can be told, where looking fails."""
    log = default_folder()
    return within(STORAGE_S, local.look, Seen("silent", log, error="its state can't be read"))


def _port(config: Config, seen: Seen) -> Check:
    return duty.port_check(duty.look_at_port(config.server.host, config.server.port), seen)


def _service(seen: Seen) -> Check:
    from mlx_worker.service.manager import manager

    return duty.service_check(manager().state("worker"), seen, home())


def _gateway(config: Config, seen: Seen, *, is_mac: bool) -> list[Check]:
    url = config.gateway.url
    link: Any = (seen.status or {}).get("link")
    return gateway.checks(gateway.look(url) if url else None, link, is_mac=is_mac)


def _to_probe(wishes: Wishes, config: Config, mlx: Device, seen: Seen) -> ModelEntry:
    """A model that a worker holds already isn't loaded beside it."""
    if wishes.model is not None:
        return named(config, wishes.model)
    if seen.is_running:
        return ModelEntry(id=DEMO)
    room = min(psutil.virtual_memory().available, mlx.budget_bytes(config.limits.memory_gb))
    return models.to_probe(config, int(ROOM_SHARE * room))


def _numbers(wishes: Wishes, found: storage.Settings, mlx: Device, seen: Seen) -> list[Check]:
    entry = _to_probe(wishes, found.config, mlx, seen)
    room = int(ROOM_SHARE * psutil.virtual_memory().available)
    if wishes.model is not None and (size := models.n_bytes(entry)) > room:
        what = f"{entry.id} has {gb(size)}, and there is room for {gb(room)}: not measured"
        return [warning("numbers", what, "stop the worker, or measure `--model demo`")]
    return rows.checks(entry.id, rows.look(entry.id, entry.draft))
