"""Names of variables that suggest a secret, and others that only look like one."""

from __future__ import annotations

import pytest

from stoker.cluster.secret_names import has_password, is_secret_name

SECRET = (
    "HF_TOKEN PGPASSWORD GHTOKEN CLIENTSECRET AWS_SECRET_ACCESS_KEY AWS_ACCESS_KEY_ID aws.secretKey API_KEY "
    "OPENAI_API_KEY DB_PASS MY_KEY dbPassword AZURE_STORAGE_KEY ENCRYPTION_KEY SIGNING_KEYS KEY"
)
OPEN = (
    "SORT_KEY CACHE_KEY PRIMARY_KEY_COLUMN MONKEY KEYBOARD TOKENIZERS_PARALLELISM HF_TOKEN_PATH "
    "AWS_SHARED_CREDENTIALS_FILE BYPASS COMPASS_DIR PASSIVE NCCL_DEBUG"
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
        ("http://h:80/a@b", False),
        ("http://u@h", False),
        ("a:b@c", False),
    ],
)
def test_urls(text: str, password: bool) -> None:
    assert has_password(text) == password
