// What is computed of curves before they are drawn.
import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import test from "node:test";
import { UNKNOWN, WHOLE, curvesOf, merged, placed, rangeOfValues, smoothed, zoomed } from "../../../src/stoker/page/static/chart.js";
import { besideOwn, evaluatedCurves, heldOutOf } from "../../../src/stoker/page/static/evaluation_curves.js";
import { nameOf, setGlossary, termOf, unitOf } from "../../../src/stoker/page/static/glossary.js";
import { t, useTable } from "../../../src/stoker/page/static/i18n.js";
import { beginning, canCopy, hasEvents, healthLevel, marksOf, metricsOf, newest, paceOf, tabsOf } from "../../../src/stoker/page/static/run.js";

useTable("en", JSON.parse(readFileSync(new URL("../../../src/stoker/page/static/messages.en.json", import.meta.url))));

test("ticks of steps are whole numbers", () => {
  assert.deepEqual(WHOLE.slice(0, 5), [1, 2, 5, 10, 20]);
  assert.ok(WHOLE.every(Number.isInteger));
});

test("zeros alone have an axis up to 1", () => {
  const pad = (least, most) => [least - 1, most + 1];
  assert.deepEqual([[null, null], [0, 0], [3, 3], [0, 2]].map(([least, most]) => rangeOfValues(least, most, pad)), [[null, null], [0, 1], [2, 4], [-1, 3]]);
});

test("smoothing keeps constants, gaps and what weight 0 says", () => {
  assert.deepEqual(smoothed([1, 2], 0), [1, 2]);
  for (const value of smoothed([3, null, 3, 3], 0.9)) assert.ok(value === null || Math.abs(value - 3) < 1e-12);
  const [first, second] = smoothed([0, 1], 0.5); // (0.5 * 0.5 * 0 + 0.5 * 1) / 0.75
  assert.equal(first, 0);
  assert.ok(Math.abs(second - 2 / 3) < 1e-12);
});

test("curves with x of their own share one", () => {
  const one = { x: [1, 3], columns: [[10, 30]] };
  const two = { x: [2, 3], columns: [[20, 33]] };
  assert.deepEqual(merged([one, two]), { x: [1, 2, 3], columns: [[[10, null, 30]], [[null, 20, 33]]] });
  assert.deepEqual(merged([one]), { x: [1, 3], columns: [[[10, 30]]] });
});

test("a zoom keeps its centre and its bounds", () => {
  assert.deepEqual(zoomed([0, 100], [0, 100], 50, 0.5), [25, 75]);
  assert.deepEqual(zoomed([0, 100], [0, 100], 0, 0.5), [0, 50]);
  assert.deepEqual(zoomed([25, 75], [0, 100], 75, 4), [0, 100]);
  assert.deepEqual(zoomed([80, 120], [0, 100], 100, 1), [60, 100]);
  assert.deepEqual(zoomed([0, 100], [0, 20], 50, 0.5), [10, 20]); // a new plot, before its first data
  assert.deepEqual(zoomed([2000, 4000], UNKNOWN, 3000, 2), [1000, 5000]); // a zoom that an address has brought
  assert.deepEqual(zoomed([2000, 4000], UNKNOWN, 3000, 0.5), [2500, 3500]);
  assert.deepEqual(zoomed([100, 300], UNKNOWN, 200, 4), [0, 800]);
});

test("the curves of a task follow its loss, which has the name of the task", () => {
  const names = ["step", "loss", "grad_norm", "lr", "tokens", "seconds", "chosen_reward", "margin", "cache_hits", "reward/length"];
  assert.deepEqual(metricsOf(names), ["loss", "chosen_reward", "margin", "reward/length", "lr", "grad_norm", "seconds"]);
  assert.deepEqual(["sft", "dpo", "grpo"].map((task) => termOf("loss", [{ task }])), ["loss", "preference_loss", "policy_loss"]);
  assert.equal(termOf("tokens_per_s", [{ task: "ranking" }]), "rows_per_s");
  assert.equal(termOf("loss", [{ task: "dpo" }, { task: "grpo" }]), "loss");
});

test("a metric of the first places has the entry of all numbers of places", () => {
  assert.deepEqual(["ndcg@10", "retrieval_recall@100", "auc", "unknown@5"].map(nameOf), ["NDCG@10", "Recall of all items@100", "Held-out AUC", "unknown@5"]);
  setGlossary([{ id: "recall", unit: "1" }]);
  assert.deepEqual(["recall@5", "unknown@5"].map(unitOf), ["1", ""]);
});

test("marks are what belongs on a curve", () => {
  const events = [{ event: "saved", step: 2, where: "disk" }, { event: "saved", step: 3, where: "memory" }, { event: "rolled_back", step: 9 }, { event: "checked" }];
  assert.deepEqual(marksOf(events), [{ step: 2, level: "ok", event: "saved" }, { step: 9, level: "warn", event: "rolled_back" }]);
});

test("many marks do not hide a curve, and those of faults cross it always", () => {
  const saves = (n) => Array.from({ length: n }, (_, i) => ({ step: (600 * i) / n, level: "ok" }));
  const toPixel = (step) => 50 + step;
  assert.ok(placed(saves(20), toPixel, 50, 650).every(([, , crosses]) => crosses));
  const dense = placed([...saves(500), { step: 90, level: "bad" }], toPixel, 50, 650);
  assert.deepEqual(dense.filter(([, , crosses]) => crosses).map(([x, { level }]) => [x, level]), [[140, "bad"]]);
  assert.equal(placed(saves(5000), toPixel, 50, 650).length, 601); // one a pixel
  assert.deepEqual(placed([{ step: -1, level: "ok" }, { step: 700, level: "bad" }], toPixel, 50, 650), []);
});

test("events are asked for of a run that is known to have begun", () => {
  const found = [{ data: null }, { data: { number: 4 } }, { data: { id: "a" }, error: { status: 404 } }, { data: { id: "a" } }, { data: { id: "a" }, error: { status: 500 } }];
  assert.deepEqual(found.map(hasEvents), [false, false, false, true, true]);
});

test("a job that waits says after what, and has no tabs of a run", () => {
  const waits = { number: 9, status: "queued", queue: { place: 2, after: ["a", "b"] } };
  assert.deepEqual([waits, { ...waits, queue: { place: 1, after: [] } }, { status: "starting" }, { ...waits, status: "failed" }, { status: "failed" }].map(beginning), [
    "It is number 2 in the queue. It begins after a, b.",
    "It is next in the queue, and begins within seconds.",
    t("run.starts"),
    t("run.never_began"),
    "",
  ]);
  assert.deepEqual([tabsOf(waits), tabsOf({ task: "sft" })[0]], [["logs", "job"], "curves"]);
});

test("a copy of a run goes on only if steps are left", () => {
  assert.deepEqual([["stopped", 3], ["failed", 3], ["stopped", 0], ["done", 3], ["running", 3]].map(([status, step]) => canCopy({ status, step })), [true, true, false, false, false]);
});

test("the figures of evaluations are curves, and a step that was done again has the newest", () => {
  const evaluated = (step, loss, auc = null) => ({ event: "evaluated", step, loss, auc, targets: 9, seconds: 1, perplexity: null });
  const events = [evaluated(0, 2, 0.5), { event: "saved", step: 1 }, evaluated(4, null), evaluated(9, 9, 0.9), evaluated(6, 1, 0.7), evaluated(9, 1, 0.8)];
  const found = evaluatedCurves(events, { id: "a", name: "A" });
  assert.deepEqual(Object.keys(found), ["held_out_loss", "auc"]);
  assert.deepEqual([found.held_out_loss.x, found.held_out_loss.series.held_out_loss.mean], [[0, 6, 9], [2, 1, 1]]);
  assert.deepEqual([found.auc.x, found.auc.series.auc.mean, found.auc.total], [[0, 6, 9], [0.5, 0.7, 0.8], 3]);
  const beside = besideOwn(found, ["loss", "lr"]);
  assert.deepEqual([beside.loss[0].series.loss.mean, beside.loss[0].run.name, beside.auc[0].run.name], [[2, 1, 1], "Held-out loss", "A"]);
  assert.deepEqual(Object.keys(besideOwn(found, [])), ["held_out_loss", "auc"]); // of a run without a step
  assert.deepEqual(besideOwn(found, ["auc"]).auc[0].run.name, "held out");
  const compared = heldOutOf([{ id: "a" }, { id: "b" }, { id: "c" }], [events, [], events], ["loss"]);
  assert.deepEqual(Object.entries(compared).map(([name, curves]) => [name, curves.map(({ run }) => run.id)]), [["held_out_loss", ["a", "c"]], ["auc", ["a", "c"]]]);
});

test("a run that failed, was interrupted or has not begun is not all right", () => {
  const ok = [{ what: "speed", level: "ok" }];
  assert.deepEqual(["running", "done", "stopped", "failed", "interrupted", "starting"].map((status) => healthLevel(ok, status)), ["ok", "ok", "ok", "bad", "warn", "none"]);
  assert.deepEqual(["failed", "queued", "running", "done"].map((status) => healthLevel([], status)), ["bad", "none", "none", "ok"]);
  assert.equal(healthLevel([{ what: "data", level: "ok" }, { what: "faults", level: "ok" }], "running"), "none");
  assert.equal(healthLevel([...ok, { level: "warn" }, { level: "bad" }], "running"), "bad");
});

test("curves of long runs are asked for less often", () => assert.deepEqual([0, 20_000, 40_000, 1_000_000].map(paceOf), [2000, 2000, 4000, 20_000]));

test("what is asked at one moment about a run is one question", async () => {
  const asked = [];
  globalThis.fetch = async (path) => {
    asked.push(path);
    return { ok: true, headers: new Map([["content-type", "application/json"]]), text: async () => JSON.stringify({ path }) };
  };
  const ask = (run, key, from) => curvesOf(run, { key, axis: "step", from });
  const answers = await Promise.all([ask("a", "loss"), ask("a", "judge:m,n"), ask("b", "loss"), ask("a", "loss", 5), ask("a", "loss")]);
  assert.deepEqual(asked, ["/api/runs/a/metrics?key=loss&key=judge%3Am%2Cn&axis=step", "/api/runs/b/metrics?key=loss&axis=step", "/api/runs/a/metrics?key=loss&axis=step&from=5"]);
  assert.deepEqual(answers.map(({ path }) => asked.indexOf(path)), [0, 0, 1, 2, 0]);
  await ask("a", "loss");
  assert.equal(asked.length, 4);
  globalThis.fetch = async () => Promise.reject(new Error("gone"));
  await assert.rejects(Promise.all([ask("a", "loss"), ask("a", "lr")]), /gone/);
});

test("of a run the newest is shown, be it read or said by its stream", () => {
  const run = { id: "a", updated: 5, step: 1, job: "x" };
  assert.deepEqual(newest(run, { id: "a", updated: 6, step: 2 }), { id: "a", updated: 6, step: 2, job: "x" });
  for (const said of [null, { id: "a", updated: 4, step: 0 }, { id: "a", updated: 5, status: "running" }, { id: "b", updated: 9, step: 9 }]) assert.equal(newest(run, said), run);
  assert.equal(newest(null, { id: "a", updated: 1 }), null);
});
