"""Settings: which place wins, and that a wrong one is named without its secrets."""

from pathlib import Path

import pytest

from mlx_swarm.broker.errors import InvalidSetting
from mlx_swarm.broker.server.config import load_settings
from mlx_swarm.broker.server.settings import Adapter, ApiKey, ServerSettings


def test_without_anything_it_is_the_defaults() -> None:
    assert load_settings({}, {"PATH": "/bin", "MLX_SWARM_PORT": ""}) == ServerSettings()


def test_the_command_line_wins_over_the_environment_and_that_over_the_file(tmp_path: Path) -> None:
    file = tmp_path / "swarm.toml"
    file.write_text("port = 1\nmax_rows = 1\nmax_lanes = 1\n")
    environment = {
        "MLX_SWARM_CONFIG": str(file),
        "MLX_SWARM_PORT": "2",
        "MLX_SWARM_MAX_ROWS": "2",
    }
    found = load_settings({"port": "3"}, environment)
    assert (found.port, found.max_rows, found.max_lanes) == (3, 2, 1)


def test_every_kind_of_setting_can_be_written_everywhere(tmp_path: Path) -> None:
    file = tmp_path / "swarm.toml"
    file.write_text(
        'max_body = "1MiB"\nallowed_hosts = ["a", "b"]\nno_auth = true\nidle_unload = 1.5\n'
        '[models]\nsmall = "synthetic:llama?layers=2"\n'
        '[adapters]\none = "folder"\ntwo = { path = "other", base = "small" }\n'
    )
    environment = {
        "MLX_SWARM_MAX_BODY": "1MiB",
        "MLX_SWARM_ALLOWED_HOSTS": "a, b",
        "MLX_SWARM_NO_AUTH": "true",
        "MLX_SWARM_IDLE_UNLOAD": "1.5",
        "MLX_SWARM_MODELS": "small=synthetic:llama?layers=2",
    }
    options = {
        "max_body": "1MiB",
        "allowed_hosts": ["a", "b"],
        "no_auth": True,
        "idle_unload": "1.5",
        "models": ["small=synthetic:llama?layers=2"],
    }
    in_file = load_settings({}, {}, str(file))
    assert in_file.adapters == {"one": "folder", "two": Adapter("other", "small")}
    for found in (in_file, load_settings({}, environment), load_settings(options, {})):
        assert (found.max_body, found.allowed_hosts) == (1 << 20, ("a", "b"))
        assert (found.no_auth, found.idle_unload) == (True, 1.5)
        assert found.models == {"small": "synthetic:llama?layers=2"}


def test_keys_of_all_places_hold(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("# ours\nfrom-file\n\nacme:of-acme\n")
    keys.chmod(0o600)
    file = tmp_path / "swarm.toml"
    file.write_text(f'api_key_file = "{keys}"\n[[api_keys]]\nsecret = "a:b"\ntenant = "toml"\n')
    environment = {"MLX_SWARM_API_KEY": "with:colon", "MLX_SWARM_API_KEYS": "one,two:second"}
    found = load_settings({}, environment, str(file))
    assert {key.secret: key.tenant for key in found.api_keys} == {
        "a:b": "toml",
        "with:colon": "",
        "one": "",
        "second": "two",
        "from-file": "",
        "of-acme": "acme",
    }
    assert "of-acme" not in repr(found)


def test_a_file_of_keys_that_all_can_read_is_told_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    keys = tmp_path / "keys"
    keys.write_text("sk-secret\n")
    keys.chmod(0o644)
    assert load_settings({"api_key_file": str(keys)}, {}).api_keys == (ApiKey("sk-secret"),)
    assert "every user" in caplog.text
    assert "sk-secret" not in caplog.text


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("prot = 1", r"sets 'prot', which is no setting; is 'port' meant\?"),
        ('port = "1"', "port in .*swarm.toml is '1': Expected int, got str"),
        ("port = 70000", "port in .* is 70000: Expected int <= 65535"),
        ("drain_seconds = -1", "drain_seconds in .*>= 0"),
        ("max_body = -5", "max_body in .*not a size"),
        ("no_auth = 1", "no_auth in .*Expected bool"),
        ('[[api_keys]]\nsecret = "sk secret"', "number 1 of api_keys in .* has a space"),
        ("[[api_keys]]\nsecret = 5", "api_keys in .* must be tables"),
        ('api_keys = ["sk-secret"]', "api_keys in .* must be tables"),
        ('[[api_keys]]\nsecret = "sk-secret', "swarm.toml is no TOML: at"),
        ("[adapters]\none = { base = 'x' }", "adapters in"),
        ('[[api_keys]]\nsecret="k"\n[[api_keys]]\nsecret="k"\ntenant="t"', "two tenants"),
    ],
)
def test_what_is_wrong_in_a_file_is_named(tmp_path: Path, text: str, told: str) -> None:
    file = tmp_path / "swarm.toml"
    file.write_text(text)
    with pytest.raises(InvalidSetting, match=told) as raised:
        load_settings({}, {}, str(file))
    assert "secret'" not in str(raised.value)
    assert "sk-" not in str(raised.value)


@pytest.mark.parametrize(
    ("name", "text", "told"),
    [
        ("MLX_SWARM_PRT", "1", r"MLX_SWARM_PRT is no setting; is MLX_SWARM_PORT meant\?"),
        ("MLX_SWARM_PORT", "tcp://10.0.0.1:80", "MLX_SWARM_PORT is 'tcp"),
        ("MLX_SWARM_MODELS", "small", "MLX_SWARM_MODELS: 'small' must be NAME=VALUE"),
        ("MLX_SWARM_API_KEY", "sk secret", "MLX_SWARM_API_KEY is no API key"),
        ("MLX_SWARM_API_KEY", "sk-ö", "MLX_SWARM_API_KEY is no API key"),
        ("MLX_SWARM_API_KEYS", "acme:", "one of MLX_SWARM_API_KEYS is no API key"),
        ("MLX_SWARM_API_KEY_FILE", "/nowhere/keys", "/nowhere/keys cannot be read: No such"),
        ("MLX_SWARM_CONFIG", "/nowhere/swarm.toml", "/nowhere/swarm.toml cannot be read: No such"),
    ],
)
def test_what_is_wrong_in_the_environment_is_named(name: str, text: str, told: str) -> None:
    with pytest.raises(InvalidSetting, match=told) as raised:
        load_settings({}, {name: text})
    assert "sk" not in str(raised.value)


def test_variables_of_others_are_left_alone() -> None:
    environment = {"MLX_SWARM_SERVICE_HOST": "10.0.0.1", "MLX_SWARM_CACHE": "/tmp"}
    assert load_settings({}, environment) == ServerSettings()


def test_what_is_wrong_on_the_command_line_is_named() -> None:
    with pytest.raises(InvalidSetting, match="--max-rows is '0': Expected int >= 1"):
        load_settings({"max_rows": "0"}, {})
