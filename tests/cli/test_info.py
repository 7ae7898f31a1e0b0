"""`miles-plugins info`, run as a command."""

from __future__ import annotations

import json

from helpers.distributions import AGENT, Site, distribution, module

GENERATOR = '''"""Makes one call.

At length.
"""

async def generate(input):
    pass

def add_arguments(parser):
    parser.add_argument("--generate-max-turns", type=int, default=8, help="Turns at most.")
    parser.add_argument("--quiet", action="store_true")
'''


def test_a_plugin_with_its_hooks_docs_and_options(site: Site) -> None:
    distribution(site.path, "zz-a", groups={"miles.generators": {"p": "zz_a"}})
    file = module(site.path, "zz_a", GENERATOR)
    result = site.run("info", "p")
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout == (
        "generator  p\n"
        "from       zz-a 1.0\n"
        "target     zz_a\n"
        f"file       {file}\n"
        "state      loaded\n"
        "choose     --generate p\n"
        "hooks      generate, add_arguments\n"
        "\n"
        "options\n"
        "  --generate-max-turns  Turns at most. (default: 8)\n"
        "  --quiet               (default: False)\n"
        "\n"
        "Makes one call.\n\nAt length.\n"
    )


def test_every_plugin_of_a_name_is_shown_unless_a_kind_is_given(site: Site) -> None:
    groups = {"miles.matchers": {"p": "zz_a:same"}}
    distribution(site.path, "zz-a", agents={"p": "zz_a"}, groups=groups)
    module(site.path, "zz_a", f"{AGENT}\ndef same(a, b):\n    return True\n")
    kinds = [
        [plugin["kind"] for plugin in json.loads(site.run("info", *words, "--json").stdout)["plugins"]]
        for words in (["p"], ["matcher", "p"])
    ]
    assert kinds == [["agent", "matcher"], ["matcher"]]


def test_json_has_what_loading_tells(site: Site) -> None:
    distribution(site.path, "zz-a", agents={"p": "zz_a"})
    file = module(site.path, "zz_a", f'"""An agent."""\n{AGENT}')
    answer = json.loads(site.run("info", "agent", "p", "--json").stdout)
    assert answer["schema"] == 1
    (plugin,) = answer["plugins"]
    expected = {"flag": "--agent p", "file": str(file), "hooks": ["run_agent"], "docs": "An agent.", "options": []}
    assert {key: plugin[key] for key in expected} == expected
    assert plugin["state"] == "loaded"


def test_a_plugin_that_cannot_be_loaded_is_shown_with_the_reason(site: Site) -> None:
    distribution(site.path, "zz-a", agents={"p": "zz_a"})
    file = module(site.path, "zz_a", "raise ValueError('no key')\n")
    result = site.run("info", "p")
    assert result.returncode == 1
    assert result.stdout.endswith(
        f"agent p of zz-a 1.0 (zz_a) cannot be imported: ValueError: no key ({file}, line 1)\n"
        "  mend it there, or tell its author\n"
    )


def test_a_family_shows_its_revisions(site: Site) -> None:
    distribution(site.path, "zz-a", groups={"miles.tito_families": {"p": "zz_a"}})
    source = (
        "class Facts:\n    checkpoints = ('acme/large',)\n"
        "    class One:\n        name, checkpoints = 'one', ('acme/small',)\n"
        "    class Two:\n        name, checkpoints = 'two', ()\n"
        "    revisions = (One, Two)\n"
        "def tito_family():\n    return Facts\n"
    )
    module(site.path, "zz_a", source)
    assert "options\n  p@one  acme/small\n  p@two  acme/large\n" in site.run("info", "family", "p").stdout


def test_a_family_that_is_none_is_shown_as_failed(site: Site) -> None:
    distribution(site.path, "zz-a", groups={"miles.tito_families": {"p": "zz_a"}})
    module(site.path, "zz_a", "def tito_family():\n    return {}\n")
    result = site.run("info", "family", "p")
    assert result.returncode == 1
    assert "family p of zz-a 1.0 failed in tito_family: AttributeError: 'dict' object" in result.stdout


def test_a_dotted_path(site: Site) -> None:
    module(site.path, "zz_pkg.agent", AGENT.replace("run_agent", "run"))
    result = site.run("info", "agent", "zz_pkg.agent.run")
    assert (result.returncode, result.stderr) == (0, "")
    assert "choose  --agent zz_pkg.agent.run\n" in result.stdout


def test_a_name_in_conflict_lists_the_forms_that_choose(site: Site) -> None:
    for name in ("zz-a", "zz-b"):
        distribution(site.path, name, agents={"p": "zz_a"})
    result = site.run("info", "p")
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr == (
        "Error: agent p is in zz-a 1.0 and zz-b 1.0\n  choose with --agent zz-a:p or --agent zz-b:p\n"
    )


def test_an_unknown_name_is_wrong_usage(site: Site) -> None:
    distribution(site.path, "zz-a", agents={"calculator": "zz_a"})
    result = site.run("info", "calculater")
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr == (
        "Error: no plugin is named calculater; did you mean calculator?\n  miles-plugins list shows the names\n"
    )


def test_an_unknown_kind_is_wrong_usage(site: Site) -> None:
    result = site.run("info", "agents", "p")
    assert result.returncode == 2
    assert result.stderr.endswith(
        "Error: expected [KIND] NAME, where KIND is one of family, agent, generator, matcher, engine, sample-hook\n"
    )


def test_the_distribution_speaks_for_itself(site: Site) -> None:
    distribution(site.path, "zz-a", agents={"p": "zz_a"})
    module(site.path, "zz_a", AGENT)
    metadata = next(site.path.glob("zz_a-*.dist-info")) / "METADATA"
    metadata.write_text(
        "Metadata-Version: 2.1\nName: zz-a\nVersion: 1.0\nSummary: Plays chess.\n"
        "Project-URL: Documentation, https://zz-a.example/docs\n"
    )
    (plugin,) = json.loads(site.run("info", "p", "--json").stdout)["plugins"]
    assert plugin["summary"] == "Plays chess."
    assert plugin["links"] == ["Documentation, https://zz-a.example/docs"]
