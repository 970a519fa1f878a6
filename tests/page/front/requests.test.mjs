// A session that has ended is begun again, or a token is asked for; a server that is gone is said in the page's words.
import assert from "node:assert/strict";
import test from "node:test";
import { get, onSignedOut, post, useToken } from "../../../src/stoker/page/static/api.js";
import { useTable } from "../../../src/stoker/page/static/i18n.js";

const answer = (status, value) => ({ ok: status < 400, status, headers: new Map([["content-type", "application/json"]]), text: async () => JSON.stringify(value), json: async () => value });

/** A server whose session has this CSRF token; without one it asks for a login. */
function server(csrf, refusal = 401) {
  const asked = [];
  globalThis.fetch = async (path, { method = "GET", headers = {} } = {}) => {
    asked.push(`${method} ${path}`);
    if (path === "/api/me") return csrf ? answer(200, { csrf }) : answer(401, { error: { message: "log in first" } });
    return csrf && headers["X-Stoker-CSRF"] === csrf ? answer(200, { done: true }) : answer(refusal, { error: { message: "no" } });
  };
  return asked;
}

test("a change after the end of its session is made in a new one", async () => {
  for (const refusal of [401, 403]) {
    useToken("old");
    const asked = server("new", refusal);
    assert.deepEqual(await post("/api/x"), { done: true });
    assert.deepEqual(asked, ["POST /api/x", "GET /api/me", "POST /api/x"]);
  }
});

test("two changes at the end of a session share a new one, also where one is refused after it has begun", async () => {
  useToken("old");
  const asked = server("new");
  assert.deepEqual(await Promise.all([post("/api/x"), post("/api/y")]), [{ done: true }, { done: true }]);
  assert.equal(asked.filter((one) => one === "GET /api/me").length, 1);
  useToken("old");
  const late = server("new");
  const atOnce = globalThis.fetch;
  let refuse = () => {};
  const refused = new Promise((done) => (refuse = done));
  let isFirst = true;
  globalThis.fetch = async (path, options) => {
    const found = await atOnce(path, options);
    if (path === "/api/y" && isFirst) await ((isFirst = false), refused);
    return found;
  };
  const slow = post("/api/y");
  await post("/api/x");
  refuse();
  assert.deepEqual(await slow, { done: true });
  assert.equal(late.filter((one) => one === "GET /api/me").length, 1);
});

test("what is refused for another reason is asked once", async () => {
  useToken("same");
  const asked = [];
  globalThis.fetch = async (path) => (asked.push(path), path === "/api/me" ? answer(200, { csrf: "same" }) : answer(403, { error: { message: "not allowed" } }));
  await assert.rejects(post("/api/x"), /not allowed/);
  assert.deepEqual(asked, ["/api/x", "/api/me"]);
});

test("where a token is asked for, the page signs in again", async () => {
  let out = 0;
  onSignedOut(() => (out += 1));
  server("");
  await assert.rejects(get("/api/x"), /no/);
  assert.equal(out, 1);
  await assert.rejects(post("/api/login"), /no/);
  assert.equal(out, 1);
});

test("a server that is gone is said in the page's words", async () => {
  useTable("en", { "app.unreachable": "It does not answer." });
  globalThis.fetch = async () => Promise.reject(new TypeError("Failed to fetch"));
  await assert.rejects(get("/api/x"), (error) => error.message === "It does not answer." && error.status === undefined);
});
