"""Names of variables that suggest a secret, and others that only look like one."""

from __future__ import annotations

import pytest

from stoker.cluster.secret_names import has_password, is_secret, is_secret_name

SECRET = (
    "HF_TOKEN PGPASSWORD GHTOKEN CLIENTSECRET AWS_SECRET_ACCESS_KEY AWS_ACCESS_KEY_ID aws.secretKey API_KEY "
    "OPENAI_API_KEY DB_PASS MY_KEY dbPassword AZURE_STORAGE_KEY ENCRYPTION_KEY SIGNING_KEYS KEY MYSQL_PWD REDIS_AUTH "
    "HOME_PW"
)
OPEN = (
    "SORT_KEY CACHE_KEY PRIMARY_KEY_COLUMN MONKEY KEYBOARD TOKENIZERS_PARALLELISM HF_TOKEN_PATH "
    "AWS_SHARED_CREDENTIALS_FILE BYPASS COMPASS_DIR PASSIVE NCCL_DEBUG SSH_AUTH_SOCK AUTHOR"
)


@pytest.mark.parametrize(
    ("name", "secret"), [*((n, True) for n in SECRET.split()), *((n, False) for n in OPEN.split())]
)
def test_names(name: str, secret: bool) -> None:
    assert is_secret_name(name) == secret


@pytest.mark.parametrize(
    ("text", "password"),
    [
        ("http://u:pw@h", True),
        ("redis://:pw@h/0", True),
        ("postgres://u:pa'ss@h/db", True),
        ("http://h:80/a@b", False),
        ("https://ghp_0123456789@h/simple", True),
        ("https://a.blob.example/c/x?sv=1&sig=abc", True),
        ("ssh://git@h", False),
        ("https://h/x?q=1", False),
        ("a:b@c", False),
    ],
)
def test_urls(text: str, password: bool) -> None:
    assert has_password(text) == password


@pytest.mark.parametrize(
    ("name", "value", "secret"),
    [
        ("AWS_SECRET_ACCESS_KEY", "/bPxRfiCYEXAMPLEKEYwJalrXUtnFEMI/K7MDENG", True),
        ("GOOGLE_APPLICATION_CREDENTIALS", "/var/secrets/google/key.json", False),
        ("AWS_WEB_IDENTITY_TOKEN", "/var/run/secrets/token", False),
        ("GOOGLE_APPLICATION_CREDENTIALS", "/key.json", False),
        ("TLS_KEY", "/mnt/Secrets/key", False),
        ("GOOGLE_APPLICATION_CREDENTIALS", "/home/alice@corp/key.json", False),
        ("AWS_WEB_IDENTITY_TOKEN", "/no/such/secrets/", False),
        ("KAFKA_AUTH", "none", False),
        ("REDIS_AUTH", "hunter2", True),
        ("DB_PASSWORD", "none", True),
        ("HF_HUB_DISABLE_IMPLICIT_TOKEN", "1", False),
        ("DB_PASSWORD", "/hunter2", True),
        ("PWD", "/", False),
        ("PIP_INDEX_URL", "https://ghp_0123456789@h/simple", True),
        ("DATA", "/bPxRfi", False),
    ],
)
def test_values(name: str, value: str, secret: bool) -> None:
    assert is_secret(name, value) == secret
