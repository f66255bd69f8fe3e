"""HTTP client for services with one or several endpoints.

The sandbox client and the inference engines share it. For each attempt the client chooses an endpoint. It retries
failures that the request did not cause, honours `Retry-After`, and ends every request by its deadline.

    SANDBOX = HttpService(
        name="sandbox",
        example_url="http://127.0.0.1:8080",
        unavailable=SandboxUnavailable,
        rejected=SandboxRefused,
    )
    client = HttpClient(["http://10.0.0.1:8080", "http://10.0.0.2:8080"], SANDBOX)
    policy = RetryPolicy(deadline=time.monotonic() + 30)
    result = await client.send(HttpRequest("/run_code", parse, policy, body=lambda attempt_id: {"code": "1"}))

Modules, from pure to I/O:

- `failures`: classification of failed attempts.
- `endpoints`: which endpoint gets the next attempt.
- `request`: one request, the state of its attempts, and when the next attempt starts, if at all.
- `pool`: connections of one event loop.
- `client`: the attempts of a request.
"""

from toolroll.http.client import HttpClient, HttpService
from toolroll.http.failures import AttemptFailed
from toolroll.http.request import AbortNotice, HttpRequest, RequestAborted, RetryPolicy

__all__ = ["AbortNotice", "AttemptFailed", "HttpClient", "HttpRequest", "HttpService", "RequestAborted", "RetryPolicy"]
