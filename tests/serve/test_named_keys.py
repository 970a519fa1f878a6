"""Keys with names: who is admitted, what each may do, and what is counted of whom."""

from __future__ import annotations

from pathlib import Path

import pytest
from serving import InProcess, in_process

from stoker.cli.main import main
from stoker.errors import UserError
from stoker.serve.named_keys import SERVER_ROLES, KeyFile, add_key, hash_of, read_keys
from stoker.serve.server_options import ServerOptions

COMPLETION = {"model": "one", "prompt": "Who", "max_tokens": 3, "temperature": 0}
TOKEN = "the-token-of-the-owner"


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("ann ask", "2 words"),
        ("ann boss " + "0" * 64, "boss is not a role"),
        ("ann ask 123", "SHA-256"),
        ("ann ask " + "0" * 65, "SHA-256"),
        ("../ann ask " + "0" * 64, "cannot be a name"),
        ("ann ask " + "0" * 64 + "\nann ask " + "1" * 64, "twice"),
    ],
)
def test_a_wrong_line_is_named_with_its_place(tmp_path: Path, line: str, says: str) -> None:
    file = tmp_path / "keys"
    file.write_text("# keys\n" + line + "\n")
    with pytest.raises(UserError, match=says) as caught:
        read_keys(file, SERVER_ROLES, option="--keys")
    assert caught.value.problems[0].line >= 2


def test_keys_are_made_changed_and_removed_by_the_verb(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "keys"
    assert main(["keys", str(file), "--add", "ann"]) == 0
    key = capsys.readouterr().out.strip()
    assert len(key) >= 32 and key not in file.read_text() and hash_of(key) in file.read_text()
    assert file.stat().st_mode & 0o077 == 0
    file.write_text(file.read_text().rstrip("\n") + "  # of the shop\n# a comment\n")
    assert main(["keys", str(file), "--add", "bob", "--role", "admin"]) == 0
    assert main(["keys", str(file), "--change", "ann", "--role", "admin"]) == 0
    assert file.read_text().splitlines()[:2] == [f"ann admin {hash_of(key)}  # of the shop", "# a comment"]
    assert main(["keys", str(file), "--add", "ann"]) == 2
    assert main(["keys", str(file), "--remove", "eve"]) == 2
    assert main(["keys", str(file), "--remove", "ann"]) == 0
    capsys.readouterr()
    assert main(["keys", str(file)]) == 0
    assert capsys.readouterr().out.startswith("bob ")


def test_a_file_in_a_folder_that_cannot_be_written_is_one_clear_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    assert main(["keys", str(tmp_path / "file" / "keys"), "--add", "ann"]) == 2
    assert f"{tmp_path}/file/keys cannot be locked: " in capsys.readouterr().err


def test_the_server_refuses_a_wrong_file_before_it_loads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "keys").write_text("ann\n")
    assert main(["serve", "nothing", "--keys", str(tmp_path / "keys")]) == 2
    assert "keys:1: 1 words instead of three" in capsys.readouterr().err


def test_keys_are_admitted_counted_and_revoked_while_the_server_runs(home: Path, tmp_path: Path) -> None:
    file = tmp_path / "keys"
    keys = {"ann": "key-of-ann-0123456789", "root": "key-of-root-012345678"}
    file.write_text(f"ann ask {hash_of(keys['ann'])}\nroot admin {hash_of(keys['root'])}\n")
    with in_process(home, ["one"], ServerOptions(token=TOKEN, keys=KeyFile(file))) as guarded:

        def status(key: str, path: str = "/v1/completions") -> int:
            return guarded.post(path, COMPLETION, headers=bearer(key)).status

        assert [status(keys["ann"]), status(keys["root"]), status(TOKEN), status("wrong")] == [200, 200, 200, 401]
        for key, allowed in ((keys["ann"], False), (keys["root"], True), (TOKEN, True)):
            shown = guarded.get("/metrics", headers=bearer(key))
            assert shown.status == (200 if allowed else 403)
            load = {"lora_name": "late", "lora_path": str(home / "nothing")}
            assert guarded.post("/v1/load_lora_adapter", load, headers=bearer(key)).status == (400 if allowed else 403)
        text = guarded.get("/metrics", headers=bearer(TOKEN)).body.decode()
        for name, count in (("ann", 1), ("root", 1), ("", 1)):
            assert f'stoker_answer_seconds_count{{key="{name}",model="one"}} {count}.0' in text
            assert f'stoker_answer_tokens_total{{key="{name}",model="one"}}' in text
        file.write_text(f"root admin {hash_of(keys['root'])}\n")
        assert [status(keys["ann"]), status(keys["root"])] == [401, 200]
        file.write_text("nonsense\n")
        assert [status(keys["root"]), status("wrong"), status(TOKEN)] == [503, 503, 200]


def test_a_server_with_keys_alone_admits_no_one_else_and_only_admins_unload(home: Path, tmp_path: Path) -> None:
    file, (ann, root) = tmp_path / "keys", map(hash_of, ("key-of-ann", "key-of-root"))
    file.write_text(f"ann ask {ann}\nroot admin {root}\n")
    with in_process(home, ["one"], ServerOptions(keys=KeyFile(file))) as guarded:

        def status(headers: dict[str, str]) -> int:
            return guarded.post("/v1/completions", COMPLETION, headers=headers).status

        def unloaded(key: str) -> int:
            return guarded.post("/v1/unload_lora_adapter", {"lora_name": "tiny"}, headers=bearer(key)).status

        assert [status({}), status(bearer("")), status(bearer("key-of-ann"))] == [401, 401, 200]
        assert [unloaded("key-of-ann"), unloaded("key-of-root")] == [403, 400]
        file.write_text(f"ann ask {root}\nroot admin {ann}\n")  # as long as before
        assert [unloaded("key-of-ann"), unloaded("key-of-root")] == [400, 403]
        file.unlink()
        assert [status(bearer("key-of-ann")), status({})] == [503, 401]


def test_a_linked_file_without_a_last_line_feed_is_changed_in_its_place(tmp_path: Path) -> None:
    file, link = tmp_path / "real", tmp_path / "keys"
    file.write_text(f"ann ask {hash_of('key')}")
    file.chmod(0o640)
    link.symlink_to(file)
    add_key(link, "bob", "admin", SERVER_ROLES)
    assert [(key.name, key.role) for key in read_keys(file, SERVER_ROLES, option="")] == [
        ("ann", "ask"),
        ("bob", "admin"),
    ]
    assert link.is_symlink() and file.stat().st_mode & 0o777 == 0o640


def test_a_run_is_loaded_over_the_base_of_another(served: InProcess, home: Path) -> None:
    asked = {**COMPLETION, "max_tokens": 12}
    with in_process(home, ["one"]) as alone:
        load = {"lora_name": "late", "lora_path": str(home / "runs" / "two")}
        reply = alone.post("/v1/load_lora_adapter", load)
        assert reply.status == 200 and reply.json["parent"] == "tiny", reply.body
        texts = [
            server.post("/v1/completions", {**asked, "model": name}).json["choices"][0]["text"]
            for server, name in ((alone, "late"), (served, "second"), (alone, "one"))
        ]
        assert texts[0] == texts[1] != texts[2]
        assert alone.post("/v1/unload_lora_adapter", {"lora_name": "late"}).status == 200
        full = {"lora_name": "full", "lora_path": str(home / "runs" / "full")}
        refused = alone.post("/v1/load_lora_adapter", full)
        assert refused.status == 400 and "no plain LoRA adapter" in refused.error["message"]
        assert refused.error["message"].endswith("; name the run when the server starts")
