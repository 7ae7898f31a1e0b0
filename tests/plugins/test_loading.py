"""Loading a plugin: every form of target, and every way in which one can be wrong."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from helpers.distributions import AGENT, distribution, module
from miles_core.errors import PluginLoadError
from miles_core.plugins import KINDS, Plugin, Registry
from miles_core.plugins.wording import listed

MATCHER = "def message_matches(stored, replayed):\n    return stored == replayed\n"


def load(site: Path, source: str, *, kind: str = "agent", target: str = "zz_a", name: str = "zz_a") -> Plugin:
    """Load the plugin p of zz-a, whose entry point is `target` and whose module is `source`."""
    groups = {"family": "tito_families", "sample-hook": "sample_hooks"}
    group = f"miles.{groups.get(kind, kind + 's')}"
    distribution(site, "zz-a", groups={group: {"p": target}})
    module(site, name, source)
    return Registry.discover(path=[str(site)], environ={}).load(kind, "p")


def refusal(site: Path, source: str, *, kind: str = "agent", target: str = "zz_a") -> str:
    """The message of the error that loading ends with, without the plugin's name in front."""
    with pytest.raises(PluginLoadError) as caught:
        load(site, source, kind=kind, target=target)
    front = f"{kind} p of zz-a 1.0 ({target}) "
    assert caught.value.message.startswith(front)
    return caught.value.message.removeprefix(front)


# -- forms of target ------------------------------------------------------------------------------------------


def test_a_module_without_our_decorator(site: Path) -> None:
    plugin = load(site, f"{AGENT}\nasync def abort(args):\n    pass\n")
    assert plugin.record.hooks == ("run_agent", "abort")
    assert plugin.record.state == "loaded"


def test_a_module_with_our_decorator_and_other_function_names(site: Path) -> None:
    source = (
        "from miles_core import hookimpl\n"
        "@hookimpl(specname='message_matches')\ndef same(stored, replayed):\n    return 'same'\n"
    )
    assert load(site, source, kind="matcher").call("message_matches", {}, {}) == "same"


def test_a_function(site: Path) -> None:
    plugin = load(site, "def same(a, b):\n    return a == b\n", kind="matcher", target="zz_a:same")
    assert plugin.call("message_matches", {"role": "user"}, {"role": "user"}) is True


def test_a_class_is_instantiated(site: Path) -> None:
    source = "class Strict:\n    def message_matches(self, stored, replayed):\n        return self is not None\n"
    assert load(site, source, kind="matcher", target="zz_a:Strict").call("message_matches", {}, {}) is True


def test_an_object_nested_in_another(site: Path) -> None:
    source = (
        "class Outer:\n    class inner:\n"
        "        @staticmethod\n        def message_matches(stored, replayed):\n            return True\n"
    )
    assert load(site, source, kind="matcher", target="zz_a:Outer.inner").has("message_matches")


def test_marked_methods_of_every_kind(site: Path) -> None:
    source = (
        "from miles_core import hookimpl\n"
        "class Hooks:\n"
        "    @hookimpl(specname='pick_samples')\n    @staticmethod\n"
        "    def pick(leaf_samples):\n        return 'picked'\n"
        "    @classmethod\n    @hookimpl(specname='postprocess_samples')\n"
        "    def finish(cls, leaf_samples):\n        return cls.__name__\n"
    )
    plugin = load(site, source, kind="sample-hook", target="zz_a:Hooks")
    assert (plugin.call("pick_samples", [], {}), plugin.call("postprocess_samples", [], {})) == ("picked", "Hooks")


def test_a_callable_class_is_instantiated_and_called(site: Path) -> None:
    source = (
        "class Generate:\n"
        "    async def __call__(self, input):\n        return input\n"
        "    @staticmethod\n    def add_arguments(parser):\n        pass\n"
    )
    plugin = load(site, source, kind="generator", target="zz_a:Generate")
    assert plugin.record.hooks == ("generate", "add_arguments")


def test_arguments_registered_on_the_generate_function(site: Path) -> None:
    source = "async def run(input):\n    pass\n\ndef flags(parser):\n    return 'flags'\n\nrun.add_arguments = flags\n"
    assert load(site, source, kind="generator", target="zz_a:run").call("add_arguments", None) == "flags"


def test_a_partial_function(site: Path) -> None:
    source = "import functools\ndef f(way, a, b):\n    return way\nsame = functools.partial(f, True)\n"
    assert load(site, source, kind="matcher", target="zz_a:same").call("message_matches", {}, {}) is True


def test_abort_beside_an_agent_function(site: Path) -> None:
    source = AGENT.replace("run_agent", "run") + "\nasync def abort(args):\n    pass\n"
    assert load(site, source, target="zz_a:run").record.hooks == ("run_agent", "abort")


def test_keys_belong_to_the_module_s_own_matcher(site: Path) -> None:
    keys = "def message_key(message):\n    return message['role']\n"
    other = "def looser(a, b):\n    return True\n"
    distribution(
        site, "zz-a", groups={"miles.matchers": {"own": "zz_a", "named": "zz_a:message_matches", "other": "zz_a:looser",
                                                 "alone": "zz_b:looser"}},
    )  # fmt: skip
    module(site, "zz_a", MATCHER + keys + other)
    module(site, "zz_b", keys + other)
    registry = Registry.discover(path=[str(site)], environ={})
    have = {name: registry.load("matcher", name).has("message_key") for name in ("own", "named", "other", "alone")}
    assert have == {"own": True, "named": True, "other": False, "alone": True}


def test_a_package_may_define_its_hooks_in_submodules(site: Path) -> None:
    module(site, "zz_a.agent", AGENT)
    (site / "zz_a" / "__init__.py").write_text("from zz_a.agent import run_agent\n")
    distribution(site, "zz-a", agents={"p": "zz_a"})
    assert Registry.discover(path=[str(site)], environ={}).load("agent", "p").has("run_agent")


def test_one_module_under_two_names_and_kinds(site: Path) -> None:
    distribution(site, "zz-a", agents={"p": "zz_a", "q": "zz_a"}, groups={"miles.matchers": {"p": "zz_a"}})
    module(site, "zz_a", AGENT + MATCHER)
    registry = Registry.discover(path=[str(site)], environ={})
    for record in registry.records:
        registry.load_record(record)
    assert [record.state for record in registry.records] == ["loaded"] * 3


def test_a_sample_hook_function_is_known_by_its_name(site: Path) -> None:
    source = "def pick_samples(leaf_samples):\n    return leaf_samples\n"
    plugin = load(site, source, kind="sample-hook", target="zz_a:pick_samples")
    assert plugin.call("pick_samples", [1], {}) == [1]


def test_an_engine_plugin_may_only_configure_sglang(site: Path) -> None:
    source = "def configure_sglang(server_args):\n    server_args.append(1)\n"
    distribution(site, "zz-a", groups={"miles.engines": {"p": "zz_a", "q": "zz_b"}})
    module(site, "zz_a", source)
    module(site, "zz_b", source)
    registry = Registry.discover(path=[str(site)], environ={})
    registry.load("engine", "p")
    registry.load("engine", "q")
    seen: list[int] = []
    registry.call_all("configure_sglang", server_args=seen)
    assert seen == [1, 1]


def test_loading_again_gives_the_same_plugin_and_a_revision_its_own(site: Path) -> None:
    distribution(site, "zz-a", groups={"miles.tito_families": {"p": "zz_a"}})
    module(site, "zz_a", "def tito_family():\n    return 'facts'\n")
    registry = Registry.discover(path=[str(site)], environ={})
    plugin = registry.load("family", "p")
    assert registry.load("family", "zz-a:p") is plugin
    chosen = registry.load("family", "p@two")
    assert (chosen.revision, plugin.revision, chosen.call("tito_family")) == ("two", None, "facts")
    assert registry.loaded == (plugin,)


# -- dotted paths ---------------------------------------------------------------------------------------------


def dotted(site: Path, path: str, kind: str = "agent", hook: str | None = None) -> Plugin:
    return Registry.discover(path=[str(site)], environ={}).load(kind, path, hook=hook)


def test_a_dotted_path_to_a_function_of_any_name_with_abort_beside_it(site: Path) -> None:
    module(site, "zz_pkg.agent", AGENT.replace("run_agent", "run") + "\nasync def abort(args):\n    pass\n")
    plugin = dotted(site, "zz_pkg.agent.run")
    assert plugin.record.hooks == ("run_agent", "abort")
    assert plugin.describe() == "agent zz_pkg.agent.run"


def test_a_dotted_path_to_a_module(site: Path) -> None:
    module(site, "zz_pkg.agent", AGENT)
    assert dotted(site, "zz_pkg.agent").has("run_agent")


def test_a_dotted_path_may_say_which_sample_hook_it_is(site: Path) -> None:
    module(site, "zz_pkg.hooks", "def first(leaf_samples):\n    return leaf_samples[:1]\n")
    plugin = dotted(site, "zz_pkg.hooks.first", "sample-hook", "pick_samples")
    assert plugin.call("pick_samples", [1, 2], {}) == [1]


@pytest.mark.parametrize(
    ("path", "message"),
    [
        (
            "zz_absent.agent.run",
            "agent zz_absent.agent.run cannot be imported: there is no module 'zz_absent'\n"
            "  is its directory on PYTHONPATH? the current one is {cwd}",
        ),
        (
            "zz_pkg.agent.rum",
            "agent zz_pkg.agent.rum cannot be loaded: zz_pkg.agent has no attribute 'rum'\n  did you mean run?",
        ),
        (
            "zz_pkg.other.run",
            "agent zz_pkg.other.run cannot be loaded: zz_pkg has no attribute 'other'\n"
            "  look into {site}/zz_pkg/__init__.py",
        ),
        (
            "zz_pkg.broken.run",
            "agent zz_pkg.broken.run cannot be imported: ModuleNotFoundError: No module named 'zz_nothing'"
            " ({site}/zz_pkg/broken.py, line 2)\n  install what provides zz_nothing, or tell its author",
        ),
    ],
)
def test_a_dotted_path_that_is_not_there_says_where_it_ends(site: Path, path: str, message: str) -> None:
    module(site, "zz_pkg.agent", AGENT.replace("run_agent", "run"))
    module(site, "zz_pkg.broken", "import os\nimport zz_nothing\n")
    with pytest.raises(PluginLoadError) as caught:
        dotted(site, path)
    assert caught.value.message == message.format(site=site, cwd=Path.cwd())


# -- imports that fail ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (
            "import sys\nsys.exit(3)",
            "SystemExit: 3 ({file}, line 2)\n  a plugin must not exit when it is imported; tell its author",
        ),
        ("raise BaseException('no')", "BaseException: no ({file}, line 1)\n  mend it there, or tell its author"),
        (
            "import json\n\njson.loads('{')",
            "JSONDecodeError: Expecting property name enclosed in double quotes: line 1 column 2 (char 1)"
            " ({file}, line 3)\n  mend it there, or tell its author",
        ),
        ("def (:", "SyntaxError: invalid syntax (zz_a.py, line 1)\n  mend it there, or tell its author"),
        (
            "from os import nothing_of_that_name",
            "ImportError: cannot import name 'nothing_of_that_name' from 'os'",
        ),
    ],
)
def test_whatever_an_import_raises_is_the_plugins_failure(site: Path, source: str, message: str) -> None:
    text = refusal(site, source)
    assert text.startswith("cannot be imported: " + message.format(file=site / "zz_a.py"))


def test_ctrl_c_during_an_import_stops_the_program(site: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        load(site, "raise KeyboardInterrupt")


def test_an_exception_that_cannot_be_shown_is_survived(site: Path) -> None:
    source = "class Odd(Exception):\n    def __str__(self):\n        raise ValueError\nraise Odd\n"
    assert refusal(site, source).startswith(f"cannot be imported: Odd ({site}/zz_a.py, line 4)\n")


def test_a_module_that_is_not_there(site: Path) -> None:
    assert refusal(site, "", target="zz_b") == (
        "cannot be imported: there is no module 'zz_b'\n  is zz-a installed whole? reinstall it, or tell its author"
    )


def test_a_missing_dependency_with_extras_says_what_to_install(site: Path) -> None:
    distribution(site, "zz-a", agents={"p": "zz_a [fast, a_b]"})
    module(site, "zz_a", "import zz_fast\n")
    with pytest.raises(PluginLoadError) as caught:
        Registry.discover(path=[str(site)], environ={}).load("agent", "p")
    assert caught.value.message == (
        "agent p of zz-a 1.0 (zz_a) cannot be imported: ModuleNotFoundError: No module named 'zz_fast'"
        f" ({site}/zz_a.py, line 1)\n  install what it needs: pip install 'zz-a[fast,a_b]'"
    )


def test_a_missing_attribute_says_which_was_meant(site: Path) -> None:
    assert refusal(site, AGENT, target="zz_a:run_agnt") == (
        "cannot be loaded: zz_a has no attribute 'run_agnt'\n  did you mean run_agent?"
    )


def test_a_class_that_needs_arguments(site: Path) -> None:
    source = "class Agent:\n    def __init__(self, url):\n        pass\n"
    assert refusal(site, source, target="zz_a:Agent") == (
        "cannot be instantiated without arguments: TypeError: Agent.__init__() missing 1 required positional"
        " argument: 'url'\n  give its __init__ defaults, or name an object"
    )


def test_a_failed_plugin_fails_again_without_a_second_import(site: Path) -> None:
    distribution(site, "zz-a", agents={"p": "zz_a"})
    module(site, "zz_a", "import sys\nsys.zz_count = getattr(sys, 'zz_count', 0) + 1\nraise ValueError('no')\n")
    registry = Registry.discover(path=[str(site)], environ={})
    messages = []
    for _ in range(2):
        with pytest.raises(PluginLoadError) as caught:
            registry.load("agent", "p")
        messages.append(caught.value.message)
    assert messages[0] == messages[1]
    assert vars(sys).pop("zz_count") == 1
    assert registry.records[0].state == "failed"
    assert registry.records[0].error == messages[0].partition("\n")[0]


def test_the_cause_is_kept(site: Path) -> None:
    with pytest.raises(PluginLoadError) as caught:
        load(site, "raise ValueError('why')")
    assert isinstance(caught.value.__cause__, ValueError)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (f"{AGENT}\ndel __name__\n", "cannot be looked into: AttributeError"),
        (
            f"{AGENT}\nclass C(tuple):\n    def __len__(self):\n        raise ValueError\nMILES_CONTRACT = C()\n",
            "cannot be looked into: ValueError",
        ),
        ("class E(Exception):\n    def __str__(self):\n        raise SystemExit\nraise E\n", "cannot be imported: E ("),
        ("raise GeneratorExit\n", "cannot be imported: GeneratorExit ("),
        ("raise ValueError('\\x1b[31m naïve')\n", "cannot be imported: ValueError: \\x1b[31m naïve ("),
        ("raise ValueError('x' * 9999)\n", f"cannot be imported: ValueError: {'x' * 1000}… ("),
        ("import sys\nsys.modules[__name__] = object()\n", "has no hook\n"),
        ("import sys\nsys.modules[__name__] = None\n", "cannot be imported: there is no module 'zz_a'\n"),
        (f"{AGENT}\nrun_agent.__signature__ = 3\n", "has a run_agent whose arguments cannot be read ("),
    ],
)
def test_a_module_that_plays_tricks_is_a_broken_plugin_like_any_other(site: Path, source: str, message: str) -> None:
    assert refusal(site, source).startswith(message)


def test_an_object_in_the_place_of_its_module_is_the_plugin(site: Path) -> None:
    agent = "async def run_agent(self, base_url, prompt): return None"
    source = f"import sys\nclass Agent:\n    {agent}\nsys.modules[__name__] = Agent()\n"
    assert load(site, source).record.hooks == ("run_agent",)


# -- hooks ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("", "has no hook\n  an agent defines run_agent"),
        ("async def run_agnt(base_url):\n    pass\n", "has no hook\n  found run_agnt; an agent defines run_agent"),
        ("async def abort(args):\n    pass\n", "has abort, and no run_agent\n  an agent defines run_agent"),
        (
            "from miles_core import hookimpl\n@hookimpl\nasync def run_agnt(base_url):\n    pass\n",
            "has a function marked as hook 'run_agnt', which does not exist\n  did you mean run_agent?",
        ),
        (
            "from miles_core import hookimpl\n@hookimpl(wrapper=True)\ndef run_agent(base_url):\n    yield\n",
            "marks run_agent as a hook wrapper, and hooks of a chosen plugin have nothing to wrap\n"
            "  write a plain function with @hookimpl",
        ),
    ],
)
def test_a_missing_or_misspelled_hook_says_which_was_meant(site: Path, source: str, message: str) -> None:
    assert refusal(site, source) == message


def test_an_imported_function_is_no_hook(site: Path) -> None:
    plugin = load(site, f"from os import abort\n{AGENT}")
    assert plugin.record.hooks == ("run_agent",)


def test_an_imported_main_hook_says_so(site: Path) -> None:
    module(site, "zz_impl", AGENT)
    assert refusal(site, "from zz_impl import run_agent\n") == (
        "has no hook\n  run_agent is there, imported from zz_impl: name that module, or define run_agent here"
    )


def test_an_object_that_answers_to_every_name_has_no_hook_by_that(site: Path) -> None:
    source = "class Any:\n    def __getattr__(self, name):\n        return print\nany = Any()\n"
    assert refusal(site, source, target="zz_a:any").startswith("has no hook\n")


def test_a_function_cannot_stand_for_two_sample_hooks(site: Path) -> None:
    source = "def hook(leaf_samples):\n    return leaf_samples\n"
    assert refusal(site, source, kind="sample-hook", target="zz_a:hook") == (
        f"is a function, and a sample-hook has the hooks {listed(KINDS['sample-hook'].hooks)}\n"
        "  name the function after the one it is, or name its module instead"
    )


# -- contract versions ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("stated", ["(1, 1)", "(0, 3)", "[1, 2]"])
def test_a_plugin_that_supports_our_contract_loads(site: Path, stated: str) -> None:
    assert load(site, f"{AGENT}\nMILES_CONTRACT = {stated}\n").has("run_agent")


@pytest.mark.parametrize(
    ("stated", "message"),
    [
        (
            "(2, 3)",
            "supports versions 2 to 3 of the agent contract, and this is version 1\n  upgrade miles-plugins",
        ),
        ("(0, 0)", "supports version 0 of the agent contract, and this is version 1\n  upgrade the plugin"),
        (
            "'1'",
            "has MILES_CONTRACT = '1', which is no range\n"
            "  write the lowest and highest version: MILES_CONTRACT = (1, 1)",
        ),
    ],
)
def test_a_contract_mismatch_says_both_versions(site: Path, stated: str, message: str) -> None:
    assert refusal(site, f"{AGENT}\nMILES_CONTRACT = {stated}\n") == message
