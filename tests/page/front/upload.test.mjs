// An upload goes on where the server stopped, and gives up after tries without progress.
import assert from "node:assert/strict";
import test from "node:test";
import { PIECE, described, digested, inPlaceOf, namedTogether, sourceOf, upload, withFormer } from "../../../src/stoker/page/static/upload.js";

const kept = new Map();
globalThis.localStorage = { getItem: (key) => kept.get(key) ?? null, setItem: (key, value) => kept.set(key, value) };

/** A server that has a file's bytes so far and breaks `breaks` times, each time after half a piece. */
function server(breaks) {
  const state = { bytes: 0, begun: 0, broken: 0 };
  const answer = (status, value) => ({ ok: status < 400, status, headers: new Map([["content-type", "application/json"]]), text: async () => JSON.stringify(value) });
  globalThis.fetch = async (path, { method, body }) => {
    if (method === "POST") {
      state.begun += 1;
      return answer(200, { id: "u1", offset: 0 });
    }
    if (method === "GET") return answer(200, { id: "u1", offset: state.bytes });
    const offset = Number(new URL(path, "http://x").searchParams.get("offset"));
    if (offset !== state.bytes) return answer(409, { error: { message: "not the next byte" } });
    if (state.broken < breaks) {
      state.broken += 1;
      state.bytes += Math.floor(body.size / 2);
      throw new TypeError("network");
    }
    state.bytes += body.size;
    return answer(200, { offset: state.bytes });
  };
  return state;
}

const file = (size, last = 0) => Object.assign(new Blob([new Uint8Array(size).fill(last, -1)]), { name: "a.jsonl", lastModified: 1 });
const pause = async () => {};

test("in pieces", async () => {
  const state = server(0);
  const sent = [];
  assert.equal(await upload(file(2 * PIECE + 5), (offset) => sent.push(offset), pause), "u1");
  assert.deepEqual(sent, [PIECE, 2 * PIECE, 2 * PIECE + 5]);
  assert.equal(state.bytes, 2 * PIECE + 5);
});

test("the same file is sent once", async () => {
  const state = server(0);
  for (let n = 0; n < 2; n += 1) assert.equal(await upload(file(7), () => {}, pause), "u1");
  assert.deepEqual([state.bytes, state.begun], [7, 1]);
});

test("another content of the same name, size and time is another file", async () => {
  const state = server(0);
  for (const last of [1, 2, 1]) await upload(file(PIECE + 9, last), () => {}, pause);
  assert.equal(state.begun, 2);
  assert.deepEqual([digested(0), digested(1), digested(2 * PIECE + 1)], [[], [0], [0, PIECE, 2 * PIECE]]);
  assert.deepEqual([digested(100 * PIECE).length, digested(100 * PIECE).at(-1)], [16, 99 * PIECE]);
});

test("files that are chosen together are all sources of the job", () => {
  const [a, b, c] = ["a", "b", "c"].map((name) => ({ id: name, name, path: `/${name}`, format: "chat" }));
  const bad = { name: "bad", path: "/bad", problem: { message: "no rows" } };
  const all = [a, b, c].reduce(withFormer, "");
  assert.deepEqual([sourceOf(all), namedTogether(all), all.id, all.format], [["/a", "/b", "/c"], "a, b, c", "c", "chat"]);
  assert.deepEqual([withFormer("", a), withFormer(bad, a), withFormer(a, bad), withFormer("", bad)], [a, a, a, bad]);
  const version = { id: "v", name: "c-v2", path: "/v" };
  assert.deepEqual([sourceOf(inPlaceOf(all, version)), inPlaceOf(a, version)], [["/a", "/b", "/v"], version]);
  assert.deepEqual([sourceOf(a), namedTogether(a), sourceOf([a, bad, b].reduce(withFormer, ""))], ["/a", "a", ["/a", "/b"]]);
});

test("after a broken connection", async () => {
  const state = server(3);
  await upload(file(PIECE + 3), () => {}, pause);
  assert.equal(state.bytes, PIECE + 3);
});

test("after a reload of the page", async () => {
  let state = server(99);
  await assert.rejects(upload(file(PIECE), () => {}, pause), /unreachable/);
  const there = state.bytes;
  state = server(0);
  state.bytes = there;
  await upload(file(PIECE), () => {}, pause);
  assert.deepEqual([state.bytes, state.begun], [PIECE, 0]);
});

test("an uploaded file is described by its first rows", async () => {
  const asked = [];
  globalThis.fetch = async (path) => (asked.push(path), { ok: true, status: 200, headers: new Map([["content-type", "application/json"]]), text: async () => '{"format": "preference", "unreadable": 0}' });
  assert.deepEqual(await described({ id: "u1", name: "a.jsonl", unreadable: [] }), { id: "u1", name: "a.jsonl", format: "preference", unreadable: 0 });
  assert.deepEqual(asked, ["/api/data/u1/format"]);
});
