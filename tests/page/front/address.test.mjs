// An address restores the view that it was made of.
import assert from "node:assert/strict";
import test from "node:test";
import { address, link, parse } from "../../../src/stoker/page/static/router.js";
import { rangeOf, zoomOf } from "../../../src/stoker/page/static/run.js";

test("there and back", () => {
  for (const view of [
    { place: "start", run: "", tab: "", query: {} },
    { place: "train", run: "a b/c", tab: "curves", query: { zoom: "10~200", smooth: "0.6", lang: "zh" } },
    { place: "compare", run: "x,y", tab: "", query: { axis: "tokens" } },
    { place: "data", run: "", tab: "rows", query: {} },
  ]) assert.deepEqual(parse(address(view)), view);
});

test("what is not an address is the start", () => {
  for (const hash of ["", "#", "#/", "#/nowhere/x", "#/%E0%A4%A"]) assert.equal(parse(hash).place, "start");
});

test("a zoom is part of it", () => {
  assert.deepEqual(rangeOf(zoomOf([1, 200.5])), [1, 200.5]);
  assert.deepEqual(rangeOf(zoomOf([-3, 2e9])), [-3, 2e9]);
  assert.equal(rangeOf("nonsense"), null);
  assert.equal(zoomOf(null), null);
});

test("another run is not shown at the zoom, rank or step of the former one", () => {
  globalThis.location = { hash: "#/train/a/curves?zoom=10~200&rank=3&smooth=0.6&find=lr" };
  assert.equal(link({ run: "b", tab: "" }), "#/train/b?smooth=0.6&find=lr");
  assert.deepEqual(parse(link({ tab: "logs" })).query, parse(location.hash).query);
  assert.equal(parse(link({ run: "a", tab: "" })).query.zoom, "10~200");
  globalThis.location = { hash: "#/compare/a?zoom=10~200" };
  assert.equal(parse(link({ run: "a,b" })).query.zoom, "10~200"); // they share one axis
  globalThis.location = { hash: "#/start/job?line=7" };
  assert.equal(link({ place: "start", run: "" }), "#/start");
});
