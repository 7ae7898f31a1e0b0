"""Any checkpoint with a Jinja chat template of its own, best effort.

There is no template of ours and no parser: rendering follows the checkpoint's template (or the one given
with `--chat-template-path`), and a suffix is what that template adds after a dummy turn.
"""

from miles_core.hookspecs import hookimpl
from miles_core.tito import ParseFacts, Revision, TitoFamily

FAMILY = TitoFamily(
    name="default",
    summary="any checkpoint, with its own chat template; best effort",
    checkpoints=(),
    revisions=(Revision(name="default", template=None),),
    package="miles_tito_families",
    allowed_append_roles=("tool", "user", "system", "assistant"),
    turn_end=None,
    stop_tokens=None,
    trailing_tokens=None,
    assistant_opener=None,
    parse_facts=ParseFacts(),
    best_effort=True,
)


@hookimpl
def tito_family() -> TitoFamily:
    """The facts of the best-effort family: none beyond the checkpoint's own template."""
    return FAMILY
