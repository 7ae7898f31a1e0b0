"""Every exception of the project, and whose fault each one is.

::

    MilesError                      base; `status` is the HTTP status, `type` the OpenAI error type
    ├── ConfigError                 the person who started the program: a flag, a file, a value (exit 2)
    ├── PluginError                 a plugin, named with its distribution
    │   ├── PluginNotFound          no plugin of that name (exit 2)
    │   ├── PluginAmbiguous         a bare name that several distributions use (exit 2)
    │   ├── PluginDisabled          excluded by MILES_PLUGINS_DISABLE or MILES_PLUGINS_ALLOW (exit 2)
    │   ├── PluginLoadError         its import, attribute, hooks or contract version are wrong
    │   └── PluginContractError     it loaded, and broke its contract when called (500)
    ├── RequestError                the agent (400)
    │   ├── HistoryError            its history neither extends nor may roll back (400)
    │   │   └── TruncatedHistory    it extends a generation that ended for length (409)
    │   ├── Unauthorized            missing or wrong key (401)
    │   ├── Forbidden               a path off the allow-list, or a key that may not (403)
    │   ├── SessionNotFound         no such session, or it is being deleted (404)
    │   ├── BodyTooLarge            (413)
    │   ├── SampleError             samples cannot be assembled (422)
    │   └── Overloaded              over a limit, or shutting down (429 / 503, with Retry-After)
    ├── RenderError                 the template refused the messages (400)
    ├── EngineError                 the engine
    │   ├── EngineUnreachable       no connection, or it broke off (502)
    │   │   └── EnginesGone         a run has waited for one, and none came back
    │   ├── EngineReplyError        a 200 answer that lacks what a turn needs (502)
    │   │   └── InexactStream       a stream whose ids and log-probs do not agree (502)
    │   ├── EngineFault             an error of its own inside a stream (the status it names)
    │   └── EngineStartError        it did not start
    ├── InvariantError              us: a token invariant broke (500)
    └── WireError                   a samples payload that cannot be encoded or decoded (500)

A message says what (with the value), where, and what to do next.
"""

from __future__ import annotations


class MilesError(Exception):
    """Base of every error this project raises on purpose.

    `status` is the HTTP status the session server answers with; `type` is the value of the `type` key
    in the JSON error body; `exit_code` is what the command line exits with.
    """

    status: int = 500
    type: str = "server_error"
    exit_code: int = 1

    def __init__(self, message: str, *, status: int | None = None) -> None:
        super().__init__(message)
        self.message = message
        if status is not None:
            self.status = status


class ConfigError(MilesError):
    """A setting given at start-up is wrong: names the setting, the value and what is accepted."""

    type = "config_error"
    exit_code = 2


class PluginError(MilesError):
    """A plugin is at fault; the message names its kind, name, distribution and version."""

    type = "plugin_error"


class PluginNotFound(PluginError):
    """No installed plugin has the requested name; lists the known ones and the closest match."""

    exit_code = 2


class PluginAmbiguous(PluginError):
    """A bare name that several third-party distributions use; lists the `dist:name` forms."""

    exit_code = 2


class PluginDisabled(PluginError):
    """The plugin is installed but excluded by an environment variable, which the message names."""

    exit_code = 2


class PluginLoadError(PluginError):
    """Importing or registering the plugin failed; `__cause__` has the original exception if any."""


class PluginContractError(PluginError):
    """A loaded plugin raised, or returned something its hook does not allow."""


class RequestError(MilesError):
    """The client's request is wrong."""

    status = 400
    type = "invalid_request_error"


class HistoryError(RequestError):
    """The request's messages neither extend the stored history nor may roll it back."""


class TruncatedHistory(HistoryError):
    """In a tree, the request extends a generation that ended with `length`."""

    status = 409


class Unauthorized(RequestError):
    """A key is configured and the request has none, or a wrong one."""

    status = 401
    type = "authentication_error"


class Forbidden(RequestError):
    """The path is not on the allow-list, or the key given does not cover it."""

    status = 403
    type = "permission_error"


class SessionNotFound(RequestError):
    """The session does not exist, or its delete is under way."""

    status = 404
    type = "not_found_error"

    def __init__(self, session_id: str) -> None:
        super().__init__(f"session not found: session_id={session_id}")


class BodyTooLarge(RequestError):
    """The request body exceeds `--max-body-mb`."""

    status = 413


class SampleError(RequestError):
    """Samples cannot be assembled from what is stored; names the turn or the hook."""

    status = 422


class Overloaded(RequestError):
    """Over the session or concurrency limit (429), or shutting down (503)."""

    status = 429
    type = "overloaded_error"

    def __init__(self, message: str, *, retry_after: int, status: int | None = None) -> None:
        super().__init__(message, status=status)
        self.retry_after = retry_after
        """Seconds, sent as the `Retry-After` header."""


class RenderError(MilesError):
    """The family's template cannot render these messages; names the message and the reason."""

    status = 400
    type = "invalid_request_error"


class EngineError(MilesError):
    """The engine is at fault; names its URL."""

    status = 502
    type = "engine_error"


class EngineUnreachable(EngineError):
    """The engine could not be reached, or the connection broke before its answer was whole."""


class EnginesGone(EngineUnreachable):
    """No engine has answered for as long as a run waits for one; the run ends, and can be gone on with."""


class EngineReplyError(EngineError):
    """The engine's 200 answer lacks something a turn needs; the message says which."""


class InexactStream(EngineReplyError):
    """A stream that does not say which ids were sampled, or with which log-probabilities; the message has both."""


class EngineFault(EngineError):
    """The engine reports an error inside a stream, under status 200; has the status and type that it names."""

    def __init__(self, message: str, *, status: int | None = None, kind: str | None = None) -> None:
        super().__init__(f"the engine failed: {message}", status=status)
        self.type = kind or self.type


class EngineStartError(EngineError):
    """An engine that we start ourselves did not come up; the message has the end of its log."""


class InvariantError(MilesError):
    """A token invariant broke: nothing was committed; the message names the first differing index."""


class WireError(MilesError):
    """A samples payload holds values that do not fit, or cannot be decoded."""
