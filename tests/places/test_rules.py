"""Rules, configuration files, and every error they can give."""

import pathlib
import re

import jax
import jax.numpy as jnp
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import optax_offload as oo
from optax_offload._places.rules import as_config, compile_pattern, decide
from optax_offload._places.step_options import Options

CONFIGS = sorted((pathlib.Path(__file__).parents[2] / "configs").glob("*.toml"))


def kinds(config, paths, nbytes=1 << 20):
    """Where rules put leaves of one size."""
    placed = decide(as_config(config), [(p, nbytes) for p in paths])
    return [p.memory_kind for p in placed]


def test_first_match_wins():
    """The order of rules is their precedence."""
    rules = [oo.Rule(".*embed.*", "device"), oo.Rule(".*")]
    assert kinds(rules, ["mu/embed", "mu/w"]) == ["device", "pinned_host"]


def test_no_match_stays_on_the_device():
    """What no rule matches stays, and says why."""
    (_, b) = decide(as_config("a"), [("a", 1 << 20), ("b", 1 << 20)])
    assert (b.memory_kind, b.why) == ("device", "no rule matches")


def test_patterns_match_the_whole_path():
    """`mu` is not `0/mu/w`."""
    assert not oo.Rule("mu").matches("0/mu/w")
    assert oo.Rule(re.compile("0/MU/w", re.IGNORECASE)).matches("0/mu/w")


@pytest.mark.parametrize("pattern", [".*/w", re.compile(".*/w"), "(?i).*/W"])
def test_a_dot_matches_a_newline(pattern):
    """A path may hold one, and `.*` means every leaf, in the user's own pattern too."""
    assert oo.Rule(pattern).matches("mu/a\nb/w")
    assert oo.Rule(pattern).regex == getattr(pattern, "pattern", pattern)
    assert kinds(pattern, ["mu/a\nb/w"]) == ["pinned_host"]


def test_parts_of_an_encoded_leaf_go_with_it():
    """Codes, scales and the number of the step; what is only named alike does not."""
    rule = oo.Rule(".*/mu/w")
    for part in ("", "/codes_int8", "/scales", "/step"):
        assert rule.matches(f"0/mu/w{part}")
    assert not rule.matches("0/mu/w/kernel")
    assert not rule.matches("0/mu/codes_int8")
    assert not oo.Rule("").matches("codes_int8")


def test_flags_of_a_compiled_pattern_stay():
    """Only `re.DOTALL` is added, once; and equal rules stay equal."""
    pattern = re.compile("a . b", re.VERBOSE | re.IGNORECASE)
    compiled = compile_pattern(pattern)
    assert compiled.flags == pattern.flags | re.DOTALL
    assert compile_pattern(compiled) is compiled
    assert compiled.fullmatch("A\nB")
    assert oo.Rule("a.b") == oo.Rule(re.compile("a.b"))


@pytest.mark.parametrize(
    ("nbytes", "kind"), [(0, "device"), (65535, "device"), (65536, "pinned_host")]
)
def test_min_bytes(nbytes, kind):
    """Small and empty leaves stay, and the bound itself goes."""
    assert kinds(".*", ["w"], nbytes) == [kind]


def test_empty_leaves_stay_whatever_the_bound():
    """There is nothing of them to move."""
    assert kinds(oo.Rule(".*", min_bytes=0), ["w"], 0) == ["device"]


def test_rule_that_matches_nothing_lists_near_paths():
    """A typing mistake shows the path that was meant first."""
    message = (
        r"rule 0, pattern '\.\*/muu/\.\*', matches no leaf\. Write '\.\*/mu/\.\*', "
        r"which matches 1 leaf\. Nearest paths: '0/mu/w', .*optional=True"
    )
    with pytest.raises(ValueError, match=message):
        kinds(".*/muu/.*", ["0/count", "0/nu/w", "0/mu/w"])
    rules = [oo.Rule(".*/muu/.*", optional=True), oo.Rule(".*")]
    assert kinds(rules, ["0/mu/w"]) == ["pinned_host"]


def test_rule_that_matches_nothing_in_an_empty_tree():
    """Without leaves there are no near paths."""
    message = (
        r"the tree has no leaves\. An optimizer without state, such as optax.sgd "
        r"without momentum, has nothing to move, so leave offload\(\.\.\.\) out"
    )
    with pytest.raises(ValueError, match=message):
        kinds("a", [])


def test_rules_are_a_list_of_strings():
    """Each a rule of its own; rules and patterns may be among them."""
    rules = [r".*/mu", oo.Rule(r".*/nu", "device"), re.compile(".*")]
    wanted = ["pinned_host", "device", "pinned_host"]
    assert kinds(rules, ["0/mu", "0/nu", "w"]) == wanted
    assert oo.OffloadConfig(["a"]).rules == (oo.Rule("a"),)


def test_rule_without_what_is_before_it_is_proposed():
    """Patterns match the whole path: `mu/.*` is most often `.*/mu/.*`."""
    message = r"'mu/\.\*', matches no leaf\. Write '\.\*/mu/\.\*', which matches 1 leaf"
    with pytest.raises(ValueError, match=message):
        kinds("mu/.*", ["0/mu/w", "0/nu/w"])


def test_rule_in_the_shadow_of_another():
    """A rule that never decides is as much a mistake as one that never matches."""
    rules = [oo.Rule(".*"), oo.Rule(".*embed.*", "device")]
    with pytest.raises(ValueError, match=r"rule 1, .* never decides: .*'embed'.*\(0, "):
        kinds(rules, ["embed", "w"])


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (
            {"pattern": "("},
            ValueError,
            r"pattern '\(' is not a valid regex: .*position 0$",
        ),
        ({"pattern": "*/mu/*"}, ValueError, r"not a glob: write '\.\*' for any text"),
        ({"pattern": 3}, TypeError, "pattern must be a regex .* got 3"),
        ({"pattern": re.compile(b"a")}, TypeError, "must match text"),
        (
            {"memory_kind": "host"},
            ValueError,
            "memory_kind is 'host'; it must be 'pinned_host', which is host memory, or "
            "'device'; or, between steps alone, 'unpinned_host', see offload_states$",
        ),
        (
            {"memory_kind": "int8"},
            ValueError,
            r"memory_kind is 'int8', which is a codec. Write Rule\(pattern, codec='",
        ),
        ({"min_bytes": -1}, ValueError, "min_bytes is -1; .* at least 0"),
        ({"min_bytes": True}, ValueError, "min_bytes is True"),
        ({"min_bytes": 0.5}, ValueError, "min_bytes is 0.5"),
        ({"slice_axis": -1}, ValueError, "slice_axis is -1; it must be an axis"),
        ({"optional": 1}, ValueError, "optional is 1; it must be a bool"),
        (
            {"codec": "int3"},
            ValueError,
            "codec is 'int3'; it must be one of 'int8', 'int8-companded', 'float8', "
            "'bfloat16', 'bfloat16-stochastic', 'bfloat16-remainder'",
        ),
        ({"codec": True}, ValueError, "codec is True; it must be one of"),
        ({"signed": 1}, ValueError, "signed is 1; it must be a bool"),
        ({"signed": "no"}, ValueError, "signed is 'no'; it must be a bool"),
    ],
)
def test_bad_rule(arguments, error, message):
    """Each argument is checked where it is given."""
    with pytest.raises(error, match=message):
        oo.Rule(**({"pattern": ".*"} | arguments))


@pytest.mark.parametrize(
    ("rules", "error", "message"),
    [
        (3, TypeError, "rules must be a regex, a Rule, a sequence of these or an"),
        ("a.toml", TypeError, r"a file. Read it first: optax_offload.load_config\('a"),
        (pathlib.Path("a"), TypeError, r"first: optax_offload.load_config\('a'\)"),
        (
            [3],
            TypeError,
            r"rules\[0\] is 3; it must be an optax_offload.Rule or a regex",
        ),
        ([], ValueError, "rules is empty, so nothing would be offloaded"),
        (oo.offload(optax.sgd(1.0)), TypeError, r"is an optimizer\. Give the rules th"),
    ],
)
def test_bad_rules(rules, error, message):
    """What is no set of rules is refused by name."""
    with pytest.raises(error, match=message):
        as_config(rules)


def test_bad_config():
    """The configuration checks its own arguments."""
    with pytest.raises(TypeError, match="rules must be a sequence of Rule"):
        oo.OffloadConfig(".*")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match=r"window_bytes is 0; .* at least 1"):
        oo.OffloadConfig([oo.Rule(".*")], 0)


def test_a_config_is_lenient_if_all_of_its_rules_are():
    """One that has to match is looked for."""
    rules = [oo.Rule("a", optional=True), oo.Rule("b")]
    config = oo.OffloadConfig(rules)
    assert not config.lenient
    assert config.made_lenient().lenient
    assert [rule.regex for rule in config.made_lenient().rules] == ["a", "b"]


def test_window_argument_overrides_the_config():
    """The nearer of two windows counts."""
    config = oo.OffloadConfig([oo.Rule(".*")], 10)
    assert as_config(config, 20).window_bytes == 20
    assert as_config(config).window_bytes == 10


@pytest.mark.parametrize("path", CONFIGS, ids=lambda p: p.stem)
def test_every_config_in_the_repository_loads(path):
    """Each says in a comment for whom it is."""
    assert oo.load_config(path).rules
    assert path.read_text().startswith("# For ")


RULE = "[[rules]]\npattern = 'a'\n"


def test_load_config(tmp_path):
    """Every key there is."""
    file = tmp_path / "c.toml"
    file.write_text(
        "window_bytes = 5\n[[rules]]\npattern = 'a'\nmemory_kind = 'device'\n"
        "[[rules]]\npattern = 'b'\nmin_bytes = 7\nslice_axis = 'none'\noptional = true"
        "\n[[rules]]\npattern = 'c'\ncodec = 'int8'\nsigned = false"
    )
    assert oo.load_config(file) == oo.OffloadConfig(
        [
            oo.Rule("a", "device"),
            oo.Rule("b", min_bytes=7, slice_axis=None, optional=True),
            oo.Rule("c", codec="int8", signed=False),
        ],
        window_bytes=5,
    )


def test_load_config_of_a_whole_training(tmp_path):
    """Parameters at rest, and what the step is jitted with."""
    file = tmp_path / "c.toml"
    rules = "[[rules]]\npattern = '.*'\n"
    file.write_text(
        "[step]\nlate_gradients = 'recompute'\nresiduals = 'host'\n"
        + rules
        + "[[parameters]]\npattern = 'layers/.*'\nmin_bytes = 0\n"
    )
    config = oo.load_config(file)
    assert config.parameters == (oo.Rule("layers/.*", min_bytes=0),)
    assert dict(**config.step) == {
        "fuse": True,
        "late_gradients": "recompute",
        "residuals": "host",
        "latency_hiding": "auto",
    }
    params = {"layers": {"w": jnp.ones((4, 8))}, "head": jnp.ones((8, 8))}
    placed = oo.place(params, config.parameters)
    kinds = jax.tree.map(lambda x: x.sharding.memory_kind, placed)
    assert kinds == {"layers": {"w": "pinned_host"}, "head": "device"}
    file.write_text(rules)
    config = oo.load_config(file)
    assert config.parameters == ()
    assert config.step == Options()
    assert oo.place(params, config.parameters) is params
    step = oo.jit(lambda x: x + 1, **config.step)
    assert step(1.0) == 2.0
    file.write_text("[step]\nlatency_hiding = 'off'\n" + rules)
    assert oo.load_config(file).step == Options(latency_hiding="off")
    file.write_text("[step]\nlatency_hiding = false\n" + rules)
    with pytest.raises(ValueError, match=r"step\.latency_hiding is False; it must be"):
        oo.load_config(file)


def test_step_options_are_a_mapping():
    """Of names that `jit` takes, and of no others."""
    with pytest.raises(KeyError, match="window"):
        Options()["window"]
    with pytest.raises(TypeError, match=r"step is \{\}; it must be what load_config"):
        oo.OffloadConfig([".*"], step={})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[[rules]\n", r"not a TOML file: .*line 1[^.]*$"),
        ('rules = "\\d+"', "not a TOML file: .*single quotes, which keep"),
        (
            "window_bytes = 5",
            r"there are no rules; the file needs one \[\[rules\]\]",
        ),
        (
            "[[parameters]]\npattern = 'w'",
            r"there are no rules.* no state, pattern = '.*' and",
        ),
        ("[step]\nfused = true", r"unknown key step\.fused; allowed are fuse"),
        ("[step]\nfuse = 'no'", r"step\.fuse is 'no'; it must be a bool"),
        ("[[parameters]]\npatern = 'w'", r"unknown key parameters\[0\]\.patern"),
        ("rules = 3", r"rules is 3; the file needs one"),
        ("rules = []", "rules is empty"),
        ("windows = 5", "unknown key windows; allowed are rules, window_bytes"),
        ("[rules]\na = 3", r"rules is \{'a': 3\}; the file needs one"),
        ("step = 3\n" + RULE, r"step is 3; write a \[step\] table"),
        ("[step]\nfused = true\n" + RULE, r"unknown key step\.fused; allowed are fuse"),
        ("[step]\nfuse = 'no'\n" + RULE, r"step\.fuse is 'no'; it must be a bool"),
        (
            "[step]\nresiduals = 'disk'\n" + RULE,
            r"step\.residuals is 'disk'; it must be one of 'device', 'host'",
        ),
        ("parameters = 3\n" + RULE, r"parameters is 3; write \[\[parameters\]\]"),
        (
            RULE + "[[parameters]]\nmin_bytes = 3",
            r"parameters\[0\] has no pattern",
        ),
        (
            RULE + "[[parameters]]\npattern = 'w'\ncodec = 'int8'",
            r"parameters has codec 'int8' in the rule of 'w', which is for the state "
            r"of an optimizer. Leave the codec out, or give one of 'nf4', 'nf4-double'",
        ),
        (
            "[[rules]]\npattern = 'w'\ncodec = 'nf4'",
            r"rules has codec 'nf4' in the rule of 'w', which is for frozen "
            r"parameters, .* give one of 'int8', 'int8-companded', ",
        ),
        (
            RULE + "[[parameters]]\npattern = 'w'\ncodec = 'nf5'",
            r"parameters\[0\].codec is 'nf5'; it must be one of .*'nf4', 'nf4-double'",
        ),
        (
            "[[rules]]\npatern = 'a'",
            r"unknown key rules\[0\].patern; allowed are pattern, memory_kind, min_byt",
        ),
        ("[[rules]]\nmin_bytes = 3", r"rules\[0\] has no pattern"),
        ("[[rules]]\npattern = '('", r"rules\[0\].pattern '\(' is not a valid regex"),
        ("[[rules]]\npattern = 1", r"rules\[0\].pattern must be a regex .* got 1"),
        (
            "[[rules]]\npattern = 'a'\nmemory_kind = 'hbm'",
            r"rules\[0\].memory_kind is 'hbm'; it must be 'pinned_host', which",
        ),
        (
            "[[rules]]\npattern = 'a'\ncodec = 'int9'",
            r"rules\[0\].codec is 'int9'; it must be one of 'int8', 'int8-companded'",
        ),
        (
            "[[rules]]\npattern = 'a'\nsigned = 'yes'",
            r"rules\[0\].signed is 'yes'; it must be a bool",
        ),
        ("window_bytes = '1GB'\n[[rules]]\npattern = 'a'", "window_bytes is '1GB'"),
    ],
)
def test_bad_file(tmp_path, text, message):
    """The error names the file, the key, what was found and what is allowed."""
    file = tmp_path / "bad.toml"
    file.write_text(text)
    with pytest.raises(ValueError, match=f"bad.toml: {message}"):
        oo.load_config(file)


def test_files_that_cannot_be_read(tmp_path):
    """The error is of the operating system's type, and says what file is meant."""
    asked = r": No such file.*\. It must be a rule file, such as `.*--out rules\.toml`"
    with pytest.raises(FileNotFoundError, match=rf"none\.toml{asked}"):
        oo.load_config(tmp_path / "none.toml")
    with pytest.raises(
        IsADirectoryError, match=rf"{tmp_path.name}: Is a directory\. It"
    ):
        oo.load_config(tmp_path)


names = st.text("abc_/0123456789", min_size=1, max_size=8)


@settings(deadline=None)
@given(st.lists(names, min_size=1, unique=True), st.lists(names, min_size=1), st.data())
def test_placement_is_the_first_match(paths, patterns, data):
    """Against the definition, for random paths and rules."""
    rules = [
        oo.Rule(
            re.escape(p) if data.draw(st.booleans()) else f".*{re.escape(p)}.*",
            data.draw(st.sampled_from(["device", "pinned_host"])),
            min_bytes=0,
            optional=True,
        )
        for p in patterns
    ]
    want = [
        next((r.memory_kind for r in rules if r.matches(path)), "device")
        for path in paths
    ]
    assert kinds(rules, paths) == want
