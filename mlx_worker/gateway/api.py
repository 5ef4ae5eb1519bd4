"""/api/v1: every route of the management API; each file has those of one noun. Event loop."""

from mlx_worker.gateway import (
    api_keys,
    api_platform,
    api_session,
    api_usage,
    api_workers,
)

ROUTES = [
    *api_session.ROUTES,
    *api_workers.ROUTES,
    *api_usage.ROUTES,
    *api_keys.ROUTES,
    *api_platform.ROUTES,
]
