"""What every request has, by typed keys. front.py fills them in."""

from aiohttp import web

REQUEST_ID = web.RequestKey("id", str)  # as X-Request-Id says it
IS_BEGUN = web.RequestKey("is_begun", bool)  # its reply's first bytes may be on their way
