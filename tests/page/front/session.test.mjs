// What is kept between reloads: the change alone is written, and tabs share one job.
import assert from "node:assert/strict";
import test from "node:test";

const kept = new Map();
Object.defineProperty(globalThis, "localStorage", { value: { getItem: (key) => kept.get(key) ?? null, setItem: (key, value) => kept.set(key, value), removeItem: (key) => kept.delete(key) } });
const { forget, keepFor, onOtherTab, remember, rememberJob, replaceJob, session } = await import("../../../src/stoker/page/static/session.js");
const KEY = "stoker.page";
const stored = () => JSON.parse(kept.get(KEY));
const otherTab = (change) => kept.set(KEY, JSON.stringify({ ...stored(), ...change }));

test("a change of one tab leaves what another tab has written", () => {
  rememberJob({ yaml: "old", name: "a" });
  otherTab({ yaml: "edited elsewhere" });
  remember({ run: "r1" });
  assert.deepEqual([stored().yaml, stored().run], ["edited elsewhere", "r1"]);
  onOtherTab({ key: "another" });
  assert.equal(session().yaml, "old");
  onOtherTab({ key: KEY });
  assert.deepEqual([session().yaml, session().name, session().run], ["edited elsewhere", "a", "r1"]);
});

test("a job that replaces another can be taken back", () => {
  rememberJob({ yaml: "mine", name: "a", previous: null });
  replaceJob({ yaml: "recipe", name: "b" });
  assert.deepEqual([session().yaml, session().previous], ["recipe", { yaml: "mine", name: "a" }]);
  replaceJob(session().previous);
  assert.deepEqual([session().yaml, session().name, session().previous], ["mine", "a", { yaml: "recipe", name: "b" }]);
  replaceJob({ yaml: "mine", name: "c" });
  assert.deepEqual(session().previous, { yaml: "recipe", name: "b" });
});

test("users of one browser share no draft, and sign-out forgets it", () => {
  keepFor("ann");
  rememberJob({ yaml: "ann's", name: "a" });
  remember({ theme: "dark" });
  keepFor("bob");
  assert.deepEqual([session().yaml, session().theme], ["", "auto"]);
  keepFor("ann");
  assert.equal(session().yaml, "ann's");
  forget();
  assert.deepEqual([session().yaml, session().theme], ["", "dark"]);
  assert.ok(![...kept.values()].some((text) => text.includes("ann's")));
});
