// A run's stream is opened again where the browser gives up, and a lost connection is said only where there was one.
import assert from "node:assert/strict";
import test from "node:test";
import { follow } from "../../../src/stoker/page/static/api.js";

class Source {
  static CLOSED = 2;
  static made = [];
  constructor(path) {
    Object.assign(this, { path, readyState: 0, listeners: {} });
    Source.made.push(this);
  }
  addEventListener(kind, act) {
    this.listeners[kind] = act;
  }
  open() {
    this.readyState = 1;
    this.onopen();
  }
  /** The server refuses, or the connection breaks. */
  fail(isRefused) {
    this.readyState = isRefused ? 2 : 0;
    this.onerror();
  }
  close() {
    this.readyState = 2;
  }
}
globalThis.EventSource = Source;

test("a stream that was refused is opened again, and begins with a reset", (context) => {
  context.mock.timers.enable({ apis: ["setTimeout"] });
  Source.made = [];
  const [events, lost] = [[], []];
  const end = follow("a b", (kind) => events.push(kind), (since) => lost.push(since > 0));
  Source.made[0].fail(true); // there is no run yet
  context.mock.timers.tick(5000);
  Source.made[1].fail(true);
  context.mock.timers.tick(5000);
  assert.deepEqual(Source.made.map(({ path }) => path), Array(3).fill("/api/runs/a%20b/stream"));
  assert.deepEqual([events, lost], [[], []]);
  Source.made[2].open();
  assert.deepEqual([events, lost], [["reset"], [false]]);
  Source.made[2].fail(false); // the browser tries again by itself
  Source.made[2].open();
  assert.deepEqual([events, lost], [["reset"], [false, true, false]]);
  Source.made[2].fail(true); // as after the end of a session
  assert.equal(lost.at(-1), true);
  end();
  context.mock.timers.tick(5000);
  assert.equal(Source.made.length, 3);
});
