"""Patterns of module names against Python's own `re` and `fnmatch`, and within their budget."""

import fnmatch
import re
import time
import warnings

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from atlas_lab.checkpoint import CheckpointError
from atlas_lab.checkpoint.patterns import BUDGET, Budget, Name, Pattern

LAYER = "model.language_model.layers.17."


def matches(pattern: str, name: str, steps: int = 10**7) -> bool:
    return Pattern.regex(pattern, "here").matches(Name(name, Budget("here", steps)))


REAL = [
    (r".*self_attn.*", "self_attn.q_proj"),
    (r".*mlp\.(gate|up|gate_up)_proj$", "mlp.up_proj"),
    (r"model\.language_model\.layers\.\d+\.mlp\.down_proj", "mlp.down_proj"),
    (r"^(?!.*(?:mlp|linear_attn)).*proj", "self_attn.o_proj"),
    (r".*layers\.(1[0-9]|[0-9])\.", "mlp.gate_proj"),
    (r".*(?<!gate)_proj$", "mlp.up_proj"),
    (r".*\bin_proj_[qz]", "linear_attn.in_proj_qkv"),
    (r".*(in_proj_(?:qkv|z)|out_proj)$", "linear_attn.in_proj_z"),
    (r".*\.layers\.[^.]+\.mlp(\.[a-z_]+){1,2}$", "mlp.gate_proj"),
]
MODULES = ["self_attn.q_proj", "self_attn.o_proj", "linear_attn.in_proj_qkv", "linear_attn.in_proj_z",
           "linear_attn.out_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]  # fmt: skip


@pytest.mark.parametrize(("pattern", "one"), REAL)
def test_patterns_of_real_configs(pattern, one):
    assert matches(pattern, LAYER + one)
    for m in MODULES:
        assert matches(pattern, LAYER + m) == bool(re.match(pattern, LAYER + m)), m


characters = st.sampled_from(
    ["a", "b", ".", r"\.", r"\d", r"\w", "[ab]", "[^a]", "1", r"\b", "^", "$", r"\B", "[a-b.]"]
)
quantifiers = st.sampled_from(["*", "+", "?", "*?", "+?", "??", "{2}", "{1,2}", "{,2}", "{2,}", "{0}", "{x}"])


def parts(inner):
    return st.one_of(
        st.tuples(inner, inner).map("".join),
        st.tuples(inner, inner).map(lambda p: f"(?:{p[0]}|{p[1]})"),
        st.tuples(st.sampled_from(["(", "(?:", "(?P<g>", "(?=", "(?!"]), inner).map(lambda p: f"{p[0]}{p[1]})"),
        st.tuples(inner, quantifiers).map(lambda p: f"(?:{p[0]}){p[1]}"),
        st.tuples(characters, quantifiers).map("".join),
    )


expressions = st.recursive(characters, parts, max_leaves=8)


@settings(max_examples=800)
@given(expressions, st.lists(st.text("ab.1\n", max_size=7), min_size=1, max_size=5))
def test_every_pattern_matches_as_re_does(pattern, names):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            theirs = re.compile(pattern)
        except re.error:
            with pytest.raises(CheckpointError, match=r"^here: found "):
                Pattern.regex(pattern, "here")
            return
    for name in names:
        assume(name or r"\B" not in pattern)  # whether \B matches in an empty string differs by release
        assert matches(pattern, name) == (theirs.match(name) is not None), name


@given(st.sampled_from(["", "a", "abc", "a.b"]), st.lists(st.text("ab.1", max_size=6), min_size=1, max_size=4))
def test_look_behind(word, names):
    for pattern in (rf".*(?<={re.escape(word)})b", rf".*(?<!{re.escape(word)})b"):
        for name in names:
            assert matches(pattern, name) == (re.match(pattern, name) is not None)


@given(st.text("ab.*?[]", max_size=7), st.text("ab.", max_size=7))
def test_wildcards_match_as_fnmatch_does(pattern, name):
    escaped = pattern.replace("[", "[[]")  # a bracket is a character here
    ours = Pattern.glob(pattern).matches(Name(name, Budget("here")))
    assert ours == fnmatch.fnmatchcase(name, escaped)


@settings(max_examples=300)
@given(st.text(max_size=30))
def test_any_text_is_a_pattern_or_one_sentence(text):
    try:
        matches(text, "model.layers.0.mlp.gate_proj")
        sentence = ""
    except CheckpointError as e:
        sentence = str(e)
    assert not sentence or (sentence.startswith("here: found ") and "\n" not in sentence)


@pytest.mark.parametrize("pattern", [
    "(a+)+b", "(a*)*b", "(a|a)*b", "(a|aa)+b", ".*.*.*.*.*.*.*.*.*.*b", "(.*)(.*)(.*)(.*)(.*)(.*)(.*)b", "(a?){500}b",
    "((((a*)*)*)*)*b", "(?:a{0,100}){0,100}b", "(?=(a+)+b)",
])  # fmt: skip
def test_no_pattern_takes_long(pattern):
    started = time.perf_counter()
    assert not matches(pattern, "a" * 60)
    assert matches(pattern, "a" * 60 + "b")
    assert time.perf_counter() - started < 1


def test_a_budget_ends_what_would_take_too_long():
    pattern = "(?=.*" * 30 + "b" + ")" * 30
    started = time.perf_counter()
    with pytest.raises(
        CheckpointError, match=r"^here: found patterns that take too many steps to match, expected simpler ones$"
    ):
        matches(pattern, "a" * 400, BUDGET)
    assert time.perf_counter() - started < 10


def test_a_whole_model_under_real_patterns_takes_a_tenth_of_the_budget():
    budget = Budget("here")
    patterns = [Pattern.regex(pattern, "here") for pattern, _ in REAL]
    for i in range(64):
        for m in MODULES:
            name = Name(f"model.language_model.layers.{i}.{m}", budget)
            assert sum(p.matches(name) for p in patterns) > 0
    assert budget.left > BUDGET * 9 // 10


@pytest.mark.parametrize(("pattern", "why"), [
    ("(a", "missing ), unterminated subpattern at position 0"),
    ("a**", "multiple repeat at position 2"),
    ("[a", "unterminated character set at position 0"),
    (r"(a)\1", r"the escape \1"),
    ("(?i)a", "the group (?i)"),
    ("(?>a)", "the group (?>a"),
    ("a++", "a possessive repeat"),
    ("a{5000}", "more than 1000 repeats"),
    ("a{99999999999}", "the repetition number is too large"),
    ("(" * 60 + ")" * 60, "nested too deeply"),
])  # fmt: skip
def test_refused(pattern, why):
    with pytest.raises(CheckpointError) as e:
        Pattern.regex(pattern, "config.json: ignore[0]")
    assert str(e.value).startswith("config.json: ignore[0]: found '")
    assert f"({why}), expected a regular expression of characters, classes, groups and repeats" in str(e.value)


def test_a_long_pattern_is_refused():
    with pytest.raises(CheckpointError, match=r"^x: found 2001 characters, expected at most 2000$"):
        Pattern.regex("a" * 2001, "x")
