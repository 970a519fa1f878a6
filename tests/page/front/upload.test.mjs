// An upload goes on where the server stopped, and gives up after tries without progress.
import assert from "node:assert/strict";
import test from "node:test";
import { PIECE, described, upload } from "../../../src/stoker/page/static/upload.js";

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

const file = (size) => Object.assign(new Blob([new Uint8Array(size)]), { name: "a.jsonl", lastModified: 1 });
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
