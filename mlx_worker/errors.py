"""Every error that the world can cause, with its wire code, HTTP status and retry rule.

Owns the exception tree and the wording of its messages. Leaves to others what to do about an
error: the doors translate once (cli → exit code, server → HTTP, link → frame). Any thread.

Class                              code                     status  retry
  ConfigError                      config_error             500     no    cli exits 2
  ModelError                       model_error              500     no
    ModelNotFound                  model_not_found          404     no
    IncompleteModel                incomplete_model         409     no    a pull mends it
    HubError                       hub_error                502     yes
      HubUnreachable               hub_unreachable          502     yes
    GatedModel                     gated_model              403     no    a licence to accept
    NoSpace                        no_space                 507     no
    ModelBusy                      model_busy               409     yes   while it is downloaded
    CheckpointError                checkpoint_error         500     no
    ModelTooLarge                  model_too_large          500     no
    UnsupportedModel               unsupported_model        500     no
    PairMismatch                   pair_mismatch            500     no    served without the draft
  RequestError                     invalid_request          400     no
    ContextTooLong                 context_length_exceeded  400     no
    NotEnoughMemory                not_enough_memory        400     no
    UnknownModel                   model_not_found          404     no
    InvalidParameter               invalid_parameter        400     no
    BadValue                       bad_value                422     no    of the gateway's own API
  NotSignedIn                      not_signed_in            401     no
  NotPermitted                     not_permitted            403     no
  NotFound                         not_found                404     no    or another organisation's
  NotAvailable                     not_found                404     no    not to this organisation
  LastOwnerKey                     last_owner_key           409     no
  NameTaken                        name_taken               409     no
  NeedsUpdate                      worker_needs_update      409     no
  TooManyTries                     too_many_tries           429     yes   after retry_after_s
  NotConnected                     worker_not_connected     503     yes   once it is back
  StoreFailed                      store_failed             503     yes   the gateway's database
  ModelInUse                       model_in_use             409     yes   after its requests
  Overloaded                       overloaded               503     yes   after retry_after_s
  ShuttingDown                       shutting_down            503     yes
  TimedOut                         timed_out                504     yes   the limit of one call
  ServiceError                     service_failed           500     no    the supervisor's word
  UpdateFailed                     update_failed            500     no    with the way back
  LinkError                        link_error               502     yes
    LinkLost                       link_lost                502     yes   after the next delay
    LinkRefused                    link_refused             502     no    token or version
  EngineDied                       engine_died              500     yes   health turns red
  GenerationFailed                 generation_failed        500     no    that request alone

str(error) is the whole line for a person: "what: value, limit. hint: next step".
"""

import math
import reprlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import ClassVar

MAX_VALUE_CHARS = 80
HINT = ". hint: "  # between a message and its next step

_values = reprlib.Repr()
_values.maxstring = _values.maxother = _values.maxlong = MAX_VALUE_CHARS
_values.maxlevel = 2  # of six, each with six items, a message could be megabytes long


def shown(value: object) -> str:
    """A value as a message shows it: its repr, cut to about MAX_VALUE_CHARS."""
    text = _values.repr(value)
    return text if len(text) <= 2 * MAX_VALUE_CHARS else f"{text[: 2 * MAX_VALUE_CHARS]}…"


def parted(line: str) -> tuple[str, str]:
    """str() of an error → its message, and its next step, empty where there is none."""
    message, _, hint = line.partition(HINT)
    return message, hint


def _megabytes(n_bytes: int) -> str:
    return f"{n_bytes / 1e6:,.0f} MB"


class WorkerError(Exception):
    """Base of all; `message` states the fact, `hint` (may be None) the next step."""

    code: ClassVar[str] = "worker_error"
    status: ClassVar[int] = 500
    retryable: ClassVar[bool] = False

    def __init__(self, message: str, *, hint: str | None = None):
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message}{HINT}{self.hint}" if self.hint else self.message


class ConfigError(WorkerError):
    """config.yaml, MLX_WORKER_* or a flag can't be used."""

    code = "config_error"


class ModelError(WorkerError):
    """A model or draft could not be loaded."""

    code = "model_error"


class ModelNotFound(ModelError):
    """No folder and no downloaded repository has this name."""

    code = "model_not_found"
    status = 404

    def __init__(self, model: str, *, hint: str | None = None):
        super().__init__(f"model not found: {model}", hint=hint or f"mlx-worker pull {model}")
        self.model = model


class IncompleteModel(ModelError):
    """A model that was pulled, of which files are missing."""

    code = "incomplete_model"
    status = 409

    def __init__(self, model: str, missing: Sequence[str], *, n_files: int):
        are = "is" if len(missing) == 1 else "are"
        super().__init__(
            f"{model}: {len(missing)} of its {n_files} files {are} not here whole ({missing[0]})",
            hint=f"mlx-worker pull {model} gets what is missing, and nothing twice",
        )


class HubError(ModelError):
    """The model hub answered, but not with what was asked for."""

    code = "hub_error"
    status = 502
    retryable = True


class HubUnreachable(HubError):
    """The model hub did not answer, or may not be asked."""

    code = "hub_unreachable"


class GatedModel(ModelError):
    """The hub gives a repository only to those who accepted its licence."""

    code = "gated_model"
    status = 403

    def __init__(self, repo: str, url: str):
        super().__init__(
            f"{repo} is gated: its licence must be accepted first",
            hint=f"accept it at {url}, run `hf auth login` with a token of the same account, "
            "then pull again",
        )


class NoSpace(ModelError):
    """The disk has no room for a model."""

    code = "no_space"
    status = 507

    def __init__(self, folder: Path | str, *, need_bytes: int, free_bytes: int):
        super().__init__(
            f"{_megabytes(need_bytes)} are still to come, the disk of {folder} has "
            f"{_megabytes(free_bytes)} free",
            hint="free some space, or choose another disk with HF_HOME; what is here is kept",
        )


class ModelBusy(ModelError):
    """A model that is being downloaded can't be removed or downloaded otherwise."""

    code = "model_busy"
    status = 409
    retryable = True

    def __init__(self, model: str):
        super().__init__(
            f"{model} is being downloaded", hint="stop that first, or wait for its end"
        )


class CheckpointError(ModelError):
    """A model folder is there, but a file in it is missing, broken or does not fit the others."""

    code = "checkpoint_error"

    def __init__(self, path: Path | str, what: str, hint: str | None = None):
        super().__init__(f"{path}: {what}", hint=hint)
        self.path = Path(path)
        self.what = what


class ModelTooLarge(ModelError):
    """A model whose weights this worker's memory can never hold."""

    code = "model_too_large"

    def __init__(self, model: str, *, need_bytes: int, budget_bytes: int):
        super().__init__(
            f"{model}: its weights take {_megabytes(need_bytes)}, "
            f"this worker may use {_megabytes(budget_bytes)}",
            hint="choose a smaller or more quantised one, or raise limits.memory_gb",
        )


class UnsupportedModel(ModelError):
    """The model is whole, but of a kind this worker can't run."""

    code = "unsupported_model"

    def __init__(self, what: str, supported: Iterable[str] = (), hint: str | None = None):
        names = ", ".join(supported)
        super().__init__(f"{what}, supported: {names}" if names else what, hint=hint)
        self.what = what


class PairMismatch(ModelError):
    """Target and draft differ in something that both must share; the target serves alone."""

    code = "pair_mismatch"

    def __init__(
        self, field: str, target_value: object, draft_value: object, hint: str | None = None
    ):
        super().__init__(
            f"{field}: target has {shown(target_value)}, draft has {shown(draft_value)}",
            hint=hint or "choose a draft made for this model, or --draft none",
        )
        self.field = field
        self.target_value = target_value
        self.draft_value = draft_value


class RequestError(WorkerError):
    """The client asked for what can't be done; `param` is the key at fault, if it is one."""

    code = "invalid_request"
    status = 400

    def __init__(self, message: str, *, param: str | None = None, hint: str | None = None):
        super().__init__(message, hint=hint)
        self.param = param


class ContextTooLong(RequestError):
    """The prompt, or the prompt with its reply, exceeds what the model can hold.

    is_least  it was not counted to its end
    """

    code = "context_length_exceeded"

    def __init__(
        self,
        *,
        tokens: int,
        limit: int,
        is_least: bool = False,
        param: str = "messages",
        hint: str | None = None,
    ):
        super().__init__(
            f"prompt has {'at least ' * is_least}{tokens:,} tokens; this model takes {limit:,}",
            param=param,
            hint=hint or "shorten the prompt or lower max_tokens",
        )
        self.tokens = tokens
        self.limit = limit


class NotEnoughMemory(RequestError):
    """A request that this worker's memory can never hold."""

    code = "not_enough_memory"

    def __init__(self, *, tokens: int, need_bytes: int, room_bytes: int):
        super().__init__(
            f"prompt and reply of {tokens:,} tokens need {_megabytes(need_bytes)}; "
            f"this worker has {_megabytes(room_bytes)} beside the model",
            param="max_tokens",
            hint="shorten the prompt, lower max_tokens, or raise limits.memory_gb",
        )


class UnknownModel(RequestError):
    """A request names a model that is not served here."""

    code = "model_not_found"
    status = 404

    def __init__(self, model: str, available: Iterable[str] = ()):
        names = ", ".join(available) or "no model"
        super().__init__(f"model: {shown(model)}, served here: {names}", param="model")
        self.model = model


class InvalidParameter(RequestError):
    """A parameter has a value outside its limit; `limit` completes "must be …"."""

    code = "invalid_parameter"

    def __init__(self, param: str, value: object, limit: str, hint: str | None = None):
        super().__init__(f"{param}: {shown(value)}, must be {limit}", param=param, hint=hint)
        self.value = value
        self.limit = limit


class BadValue(RequestError):
    """The gateway's own API was given what a key of it can't be."""

    code = "bad_value"
    status = 422


class NotSignedIn(WorkerError):
    """No key, or none that is known here."""

    code = "not_signed_in"
    status = 401


class NotPermitted(WorkerError):
    """The key is known, and may not do this."""

    code = "not_permitted"
    status = 403


class NotFound(WorkerError):
    """Nothing here has this id, or it is somebody else's, which reads the same."""

    code = "not_found"
    status = 404

    def __init__(self, kind: str, id: str):
        super().__init__(f"{kind}: {shown(id)}, there is none")


class NotAvailable(WorkerError):
    """The platform doesn't offer this to the organisation."""

    code = "not_found"
    status = 404

    def __init__(self, what: str, organisation: str):
        super().__init__(
            f"{what}: not available to {shown(organisation)}",
            hint="ask whoever runs the gateway",
        )


class LastOwnerKey(WorkerError):
    """Without an owner's key nobody could manage the organisation any more."""

    code = "last_owner_key"
    status = 409

    def __init__(self, name: str):
        super().__init__(f"{name} is the last owner's key", hint="create another owner's key first")


class NameTaken(WorkerError):
    """A name that must be the only one, and isn't."""

    code = "name_taken"
    status = 409

    def __init__(self, kind: str, name: str):
        super().__init__(f"{kind}: {shown(name)} is there already", hint="choose another name")


class NeedsUpdate(WorkerError):
    """A worker's version doesn't take a setting from the gateway."""

    code = "worker_needs_update"
    status = 409

    def __init__(self, name: str, version: str, setting: str):
        super().__init__(
            f"worker {name} has version {version}, which does not take {setting} from here",
            hint="run `mlx-worker update` there; its policies.json works until then",
        )


class TooManyTries(WorkerError):
    """Too many wrong keys from one address, or from all."""

    code = "too_many_tries"
    status = 429
    retryable = True

    def __init__(self, *, retry_after_s: float):
        super().__init__(
            "too many wrong keys were tried", hint=f"try again in {math.ceil(retry_after_s)} s"
        )
        self.retry_after_s = retry_after_s


class NotConnected(WorkerError):
    """A worker that is to be told something is not there."""

    code = "worker_not_connected"
    status = 503
    retryable = True

    def __init__(self, name: str):
        super().__init__(
            f"worker {name} is not connected", hint="start it, or try again once it is back"
        )


class StoreFailed(WorkerError):
    """The gateway's database did not do what was asked of it."""

    code = "store_failed"
    status = 503
    retryable = True

    def __init__(self, what: str):
        super().__init__(f"the gateway's database: {what}", hint="try again; its log may say more")


class ModelInUse(WorkerError):
    """A model that is to be removed while requests need it."""

    code = "model_in_use"
    status = 409
    retryable = True

    def __init__(self, model: str, *, n_requests: int):
        what = "1 request" if n_requests == 1 else f"{n_requests} requests"
        super().__init__(
            f"{model}: {what} running or waiting", hint="try again once the model has answered"
        )
        self.model = model


class Overloaded(WorkerError):
    """No room for this request now; there will be after about `retry_after_s`."""

    code = "overloaded"
    status = 503
    retryable = True

    def __init__(self, message: str, *, retry_after_s: float, hint: str | None = None):
        super().__init__(message, hint=hint or f"try again in {math.ceil(retry_after_s)} s")
        self.retry_after_s = retry_after_s


class ShuttingDown(WorkerError):
    """The worker was told to stop: it takes no more, and finishes only what fits."""

    code = "shutting_down"
    status = 503
    retryable = True

    def __init__(self) -> None:
        super().__init__("the worker is shutting down", hint="ask another, or start it again")


class TimedOut(WorkerError):
    """A call took longer than a worker lets one take, waiting included."""

    code = "timed_out"
    status = 504
    retryable = True

    def __init__(self, limit_s: float):
        super().__init__(
            f"not done after {limit_s:g} s, the limit of this worker",
            hint="ask for fewer tokens, or raise limits.call_s",
        )
        self.limit_s = limit_s


class ServiceError(WorkerError):
    """The supervisor of this user's services did not do what it was told."""

    code = "service_failed"


class UpdateFailed(WorkerError):
    """A newer version could not be installed, or doesn't start."""

    code = "update_failed"


class LinkError(WorkerError):
    """The connection to the control plane failed."""

    code = "link_error"
    status = 502
    retryable = True


class LinkLost(LinkError):
    """The network failed: dial again after the next delay."""

    code = "link_lost"


class LinkRefused(LinkError):
    """The control plane said no (token or version): dialling again at once can't help."""

    code = "link_refused"
    retryable = False


class EngineDied(WorkerError):
    """The thread that owns the model has ended; nothing can be generated until a restart."""

    code = "engine_died"
    retryable = True


class GenerationFailed(WorkerError):
    """One request broke (its logits were NaN or all masked); it fails alone, the worker goes on."""

    code = "generation_failed"
