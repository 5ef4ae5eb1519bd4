"""What handlers find in the gateway's application and in each request, by typed keys.

Owns the names alone; app.py puts the parts in, front.py fills the request.
"""

from aiohttp import web

from mlx_worker.gateway.auth import Caller, Logins
from mlx_worker.gateway.fleet import Fleet
from mlx_worker.gateway.security import Rules
from mlx_worker.gateway.settings import GatewaySettings
from mlx_worker.gateway.store import Store
from mlx_worker.gateway.traffic import Traffic

STORE = web.AppKey("store", Store)
REGISTRY = web.AppKey[Fleet]("registry")
SETTINGS = web.AppKey("settings", GatewaySettings)
RULES = web.AppKey("rules", Rules)
TRAFFIC = web.AppKey("traffic", Traffic)
LOGINS = web.AppKey("logins", Logins)

CALLER = web.RequestKey("caller", Caller)  # who asks; not there on routes that need no key
